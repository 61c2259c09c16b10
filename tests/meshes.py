"""Device meshes for functions that run in the pool of ranks."""

import functools

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the CPU mesh of this shape, the same one whenever a rank asks again.

    A mesh brings process groups, which live as long as their rank. gloo gives each a thread that wakes up a hundred
    times a second: a pool in which every test made its own would soon do little else.
    """
    return init_device_mesh("cpu", shape, mesh_dim_names=names)
