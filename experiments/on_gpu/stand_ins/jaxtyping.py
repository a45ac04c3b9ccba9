"""Stands in for jaxtyping where it is not installed.

Our code uses jaxtyping to say shapes in annotations, which nobody reads at run
time. Here `Float[Array, "tokens d_model"]` is `Array`, so that such code can be
imported. The worker of gpu_check puts this folder on the path, at its end and
only if there is no jaxtyping; nothing else may.
"""

from typing import Any

from jax import Array

__all__ = [
  "Array",
  "BFloat16",
  "Bool",
  "Float",
  "Float32",
  "Int",
  "Int32",
  "PRNGKeyArray",
  "PyTree",
  "Shaped",
  "UInt",
  "UInt16",
  "UInt32",
]

PRNGKeyArray = Array


class PyTree:
  """`PyTree` is any pytree, and so is `PyTree[leaf_type]`."""

  def __class_getitem__(cls, leaf_type: Any) -> Any:
    return cls


class _AnyShape:
  """`_AnyShape[array_type, "shape"]` is array_type."""

  def __class_getitem__(cls, parameters: tuple[Any, str]) -> Any:
    array_type, _ = parameters
    return array_type


BFloat16 = Bool = Float = Float32 = Int = Int32 = _AnyShape
Shaped = UInt = UInt16 = UInt32 = _AnyShape
