"""Interpreted kernels inside shard_map: one fake device after the other.

The GPU interpreter keeps the memory and barriers of all devices of a mesh in
one state. It checks at the end of the first device's kernel that no barrier is
left, although the others' are in use, and lets a device begin its next kernel
in the state of the last. So kernels are interpreted from a host callback, where
there is no mesh, under a lock.
"""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

_lock = threading.Lock()


def interpret_kernel(kernel: Callable[..., Any], *arrays: PyTree[Array]) -> Any:
  """What kernel(*arrays) returns, inside a shard_map or not.

  Args:
    kernel: A function of arrays that calls interpreted kernels.
    arrays: The device's own.
  """
  if not jax.sharding.get_abstract_mesh().manual_axes:
    return kernel(*arrays)
  compiled = jax.jit(kernel)

  def run(*arrays: Any) -> Any:
    with _lock:
      return jax.tree.map(np.asarray, compiled(*arrays))

  return jax.pure_callback(run, jax.eval_shape(kernel, *arrays), *arrays)
