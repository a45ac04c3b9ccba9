"""Fingerprints of a state, by which damage to a checkpoint is found.

The files of a checkpoint hold compressed arrays without checksums of their own:
a flipped bit in one of them is read as other numbers. So a checkpoint has, for
each array, the sum over elements i of bits(i) · (2i + 1) modulo 2³². Factors
are odd, so that a change of any one element changes the sum, and they differ,
so that exchanging two does. The sum is made on the devices that hold the array,
in one pass, and does not depend on how it is cut: a state that is read onto
another mesh has the same.
"""

import functools
import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, PyTree, UInt32

from twell_jax.training.sharding import path_name


class Fingerprints(NamedTuple):
  """What is known of the arrays of a state.

  Attributes:
    sums: Type and checksum of each array ("float32:00c0ffee") by its name.
    not_finite: Names of the arrays that hold a NaN or an infinity.
  """

  sums: dict[str, str]
  not_finite: list[str]


class _OnDevice(NamedTuple):
  sums: UInt32[Array, "arrays"]
  finite: Bool[Array, "arrays"]


def state_fingerprints(state: PyTree[Array]) -> Fingerprints:
  """Reads a state once, on its devices.

  Args:
    state: Arrays on one mesh; of several processes, all call this together.

  Returns:
    The fingerprints of the arrays by the names of their paths, the same in
    every process.
  """
  paths, arrays = zip(*jax.tree.leaves_with_path(state), strict=True)
  names = [path_name(path) for path in paths]
  made = jax.device_get(_compiled(arrays[0].sharding.mesh)(arrays))
  sums = {
    name: f"{array.dtype}:{checksum:08x}"
    for name, array, checksum in zip(names, arrays, made.sums, strict=True)
  }
  finite = dict(zip(names, made.finite, strict=True))
  return Fingerprints(sums, [name for name in names if not finite[name]])


def json_fingerprint(value: Any) -> int:
  """A checksum of what JSON can hold, tuples being lists to it."""
  return zlib.crc32(json.dumps(value, sort_keys=True).encode())


@functools.cache
def _compiled(mesh: Mesh) -> Callable[[tuple[Array, ...]], _OnDevice]:
  """The compiled function; its results are on every device, hence host."""

  def on_device(arrays):
    return _OnDevice(
      jnp.stack([_checksum(array) for array in arrays]),
      jnp.stack([_is_finite(array) for array in arrays]),
    )

  return jax.jit(on_device, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _checksum(array: Array) -> UInt32[Array, ""]:
  if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
    array = jax.random.key_data(array)
  if array.dtype == jnp.bool:
    array = array.astype(jnp.uint8)
  # Of 8 bytes, two elements of 4 each, in one more dimension.
  width = jnp.dtype(f"uint{8 * min(array.dtype.itemsize, 4)}")
  bits = jax.lax.bitcast_convert_type(array, width).astype(jnp.uint32)
  place = jnp.zeros(bits.shape, jnp.uint32)
  for axis, size in enumerate(bits.shape):
    place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(
      jnp.uint32, bits.shape, axis
    )
  return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def _is_finite(array: Array) -> Bool[Array, ""]:
  if not jnp.issubdtype(array.dtype, jnp.floating):
    return jnp.bool(True)
  return jnp.all(jnp.isfinite(array))
