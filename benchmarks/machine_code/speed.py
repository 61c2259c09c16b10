"""How many programs an SM holds, and the time that follows for a launch: a model, stated here, not a measurement."""

from dataclasses import dataclass

from machine_code.assembly import Code

REGISTERS, WARPS, BLOCKS, SHARED = 65536, 64, 32, 227 * 1024  # of an SM of sm_90
PER_BLOCK_SHARED = 1024  # bytes that the system takes of each block's
ISSUES = 4  # instructions that an SM starts in a clock, each of another warp


@dataclass(frozen=True)
class Device:
    """A GPU. Bandwidth in B/s, times in s, clock in Hz. ``latency``: of a load under load; ``launch``: fixed cost."""

    bandwidth: float = 4.3e12
    latency: float = 0.7e-6
    launch: float = 3e-6
    clock: float = 1.755e9
    sms: int = 132


def blocks_per_sm(code: Code) -> int:
    """Return how many blocks an SM holds at a time. Registers come in 8 a thread, 256 a warp."""
    per_warp = -(-code.registers // 8) * 8 * 32
    by_registers = REGISTERS // 4 // per_warp * 4 // code.warps
    by_shared = SHARED // (code.shared + PER_BLOCK_SHARED)
    return min(by_registers, by_shared, WARPS // code.warps, BLOCKS)


def bytes_in_flight(code: Code) -> int:
    """Return how many bytes the loads of an SM ask for at once, where all its programs stream."""
    return code.bytes_in_flight * 32 * code.warps * blocks_per_sm(code)


def seconds(code: Code, programs: int, moved: float, turns: float, remainders: int, device: Device) -> float:
    """Return the time of a launch.

    The slowest of four, and what the launch costs, and one program from its first to its last instruction: the last one
    to start has the device to itself. The four: bytes over bandwidth; bytes over what the loads in flight bring in each
    latency; instructions over what all SMs can start; programs over how many run at a time, each as long as its chain
    of loads takes. Not in it: how loads and stores share a bus, waiting for other launches, rare branches.

    Args:
        moved: bytes of all programs, loads and stores.
        turns: of a program's loop, on average.
        remainders: programs that take elements that fill no vector.
    """
    slots = blocks_per_sm(code) * device.sms
    loop = code.stream or (code.loops[0] if code.loops else None)
    instructions = programs * (code.straight + (turns * (code.turn or len(loop.body)) if loop else 0))
    alone = device.latency * (code.chain + max(turns - 1, 0))
    if remainders and code.narrow is not None:
        instructions += remainders * len(code.narrow.body)
        alone += device.latency
    issue = instructions * code.warps / (ISSUES * device.sms * device.clock)
    limits = [moved / device.bandwidth, issue, programs / slots * alone]
    if code.stream is not None:
        loads, stores = (sum(code.stream.accesses(each)) for each in ("LDG", "STG"))
        limits.append(moved * loads / (loads + stores) * device.latency / (bytes_in_flight(code) * device.sms))
    return device.launch + max(limits) + alone
