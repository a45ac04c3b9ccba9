"""Interpreted kernels inside shard_map: one fake device after the other.

The GPU interpreter keeps the memory and barriers of all devices of a mesh in
one state, and checks at the end of the first device's kernel that no barrier is
left, although the others' are in use. So a kernel with barriers is interpreted
from a host callback, where there is no mesh, under a lock.
"""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

_lock = threading.Lock()


def interpret_kernel(kernel: Callable[..., Any], *arrays: Array) -> Any:
  """What kernel(*arrays) returns, inside a shard_map or not.

  Args:
    kernel: A function of arrays that calls an interpreted kernel.
    arrays: The device's own.
  """
  if not jax.sharding.get_abstract_mesh().manual_axes:
    return kernel(*arrays)
  compiled = jax.jit(kernel)

  def run(*arrays: Any) -> Any:
    with _lock:
      return jax.tree.map(np.asarray, compiled(*arrays))

  return jax.pure_callback(run, jax.eval_shape(kernel, *arrays), *arrays)
