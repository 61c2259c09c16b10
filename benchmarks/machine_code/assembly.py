"""Facts of compiled code: resources, memory accesses, loops and dependent loads, out of PTX and SASS."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
UNIFORM = 1000  # added to the numbers of registers that a warp shares
WIDE = 8  # bytes; an access of fewer serves one or two elements
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
WIDTHS = {"64": 8, "128": 16, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
READS_FIRST = ("STG", "STS", "ST", "RED", "BRA", "EXIT", "BAR", "ISETP", "FSETP", "DSETP", "PLOP3", "R2P")


@dataclass(frozen=True)
class Instruction:
    """One instruction of SASS: its address, whether a predicate may skip it, operation with modifiers, operands."""

    address: int
    conditional: bool
    operation: str
    operands: str

    @property
    def opcode(self) -> str:
        """The operation without modifiers."""
        return self.operation.partition(".")[0]

    @property
    def width(self) -> int:
        """Bytes that one thread's access takes."""
        return next((WIDTHS[part] for part in self.operation.split(".") if part in WIDTHS), 4)

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"0x([0-9a-f]+)", self.operands) if self.opcode == "BRA" else None
        return int(found[1], 16) if found else None

    @cached_property
    def registers(self) -> tuple[list[int], list[int]]:
        """Registers that are written and that are read."""
        names = [re.findall(r"\b(U?)R(\d+)\b", part) for part in self.operands.split(",")]
        numbers = [[int(number) + (UNIFORM if uniform else 0) for uniform, number in part] for part in names]
        flat = [number for part in numbers for number in part]
        if self.opcode in READS_FIRST or not numbers[0]:
            return [], flat
        count = max(1, self.width // 4) if self.opcode in ("LDG", "LDS") else 2 if self.opcode[0] == "D" else 1
        first = numbers[0][0]
        return list(range(first, first + count)), [n for part in numbers[1:] for n in part]


@dataclass(frozen=True)
class Loop:
    """Instructions that a backward branch repeats."""

    body: list[Instruction]

    @property
    def opcodes(self) -> set[str]:
        """Return what kinds of instructions there are."""
        return {each.opcode for each in self.body}

    def accesses(self, opcode: str) -> list[int]:
        """Return the widths of all loads, LDG, or stores, STG."""
        return [each.width for each in self.body if each.opcode == opcode]

    @property
    def is_wide(self) -> bool:
        """Whether most loads are of several elements; others are of scales, of which elements of a group share one."""
        widths = self.accesses("LDG")
        return 2 * sum(width >= WIDE for width in widths) > len(widths)

    @property
    def bytes_in_flight(self) -> int:
        """The most bytes that one thread's loads have asked for before anything waits for one of them."""
        most = asked = 0
        pending: set[int] = set()
        for each in self.body:
            written, read = each.registers
            if pending.intersection(read):
                asked, pending = 0, set()
            if each.opcode == "LDG":
                asked += each.width
                pending.update(written)
            most = max(most, asked)
        return most


@dataclass(frozen=True)
class Code:
    """One compiled kernel.

    Attributes:
        registers: of a thread. spilled: bytes of a thread's stack and local memory. shared: bytes of a block.
        warps: of a block.
        fused: multiplications fused with an addition, in fp32 and in fp64.
        approximate: divisions and square roots that are not correctly rounded.
    """

    registers: int
    spilled: int
    shared: int
    warps: int
    fused: tuple[int, int]
    approximate: int
    instructions: list[Instruction]

    @classmethod
    def of(cls, compiled: "triton.compiler.CompiledKernel") -> "Code":
        """Read what Triton compiled."""
        ptx = compiled.asm["ptx"]
        registers, spilled, shared = resources(compiled)
        return cls(
            registers=registers,
            spilled=spilled,
            shared=max(shared, compiled.metadata.shared),
            warps=compiled.metadata.num_warps,
            fused=(len(re.findall(r"fma\.rn(?:\.ftz)?\.f32", ptx)), len(re.findall(r"fma\.rn\.f64", ptx))),
            approximate=len(re.findall(r"(?:div|sqrt)\.(?:approx|full)", ptx)),
            instructions=[
                Instruction(int(at, 16), bool(guard), name, rest)
                for at, guard, name, rest in INSTRUCTION.findall(_cuobjdump("-sass", compiled))
            ],
        )

    @cached_property
    def loops(self) -> list[Loop]:
        """Innermost loops over global memory."""
        spans = [(each.target, each.address) for each in self.instructions if each.target is not None]
        back = [(first, last) for first, last in spans if first < last]
        inner = [s for s in back if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in back)]
        loops = [Loop([each for each in self.instructions if first <= each.address <= last]) for first, last in inner]
        return [loop for loop in loops if loop.accesses("LDG")]

    @cached_property
    def stream(self) -> Loop | None:
        """The loop over whole vectors; None where a kernel has none. Loops in fp64 add up what programs have found."""
        wide = [loop for loop in self.loops if loop.is_wide and "DADD" not in loop.opcodes]
        return max(wide, key=lambda loop: sum(loop.accesses("LDG")), default=None)

    @cached_property
    def narrow(self) -> Loop | None:
        """The loop over single elements, which takes what is left of a row; None where a kernel has none."""
        narrow = [loop for loop in self.loops if not loop.is_wide]
        return max(narrow, key=lambda loop: len(loop.body), default=None)

    @property
    def bytes_in_flight(self) -> int:
        """What one thread's loads of the streaming loop ask for at once."""
        return 0 if self.stream is None else self.stream.bytes_in_flight

    @cached_property
    def turn(self) -> int:
        """Instructions that one warp runs in a turn of the streaming loop at least: those of no slow path.

        A division or a root calls one where its operands are 0, subnormal, not finite or near the ends of their range.
        """
        if self.stream is None:
            return 0
        places = {each.address: place for place, each in enumerate(self.instructions)}
        return self._distance(places[self.stream.body[0].address], places[self.stream.body[-1].address]) + 1

    @cached_property
    def straight(self) -> int:
        """Instructions that one warp runs through at least, before and after the loop over its elements or summands."""
        loop = self.stream or (self.loops[0] if self.loops else None)
        if loop is None:
            return self._distance(0, None)
        places = {each.address: place for place, each in enumerate(self.instructions)}
        first, last = places[loop.body[0].address], places[loop.body[-1].address]
        return self._distance(0, first) + self._distance(last + 1, None)

    def _distance(self, start: int, end: int | None) -> int:
        """Return the fewest instructions from one to another, or to the end of the program; calls are not followed."""
        places = {each.address: place for place, each in enumerate(self.instructions)}
        reached, seen, steps = {start}, {start}, 0
        while reached:
            if end in reached or (end is None and any(self.instructions[at].opcode == "EXIT" for at in reached)):
                return steps
            following = set()
            for at in reached:
                each = self.instructions[at]
                if each.target is not None:
                    following.add(places[each.target])
                if each.target is None or each.conditional:
                    following.add(at + 1)
            reached = {at for at in following - seen if at < len(self.instructions)}
            seen |= reached
            steps += 1
        raise ValueError(f"no way from instruction {start} to {'the end' if end is None else end}")

    @cached_property
    def chain(self) -> int:
        """Accesses to global memory of which each waits for the one before it, loops taken once."""
        depth: dict[int, int] = {}
        longest = 0
        for each in self.instructions:
            written, read = each.registers
            reached = max((depth.get(number, 0) for number in read), default=0)
            reached += each.opcode in ("LDG", "ATOMG")
            longest = max(longest, reached)
            depth |= dict.fromkeys(written, reached)
        return longest


def resources(compiled: "triton.compiler.CompiledKernel") -> tuple[int, int, int]:
    """Return a thread's registers, its bytes of stack and local memory, and a block's bytes of static shared memory."""
    usage = _cuobjdump("-res-usage", compiled)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump -res-usage names no registers: {usage!r}")
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack + local, shared


def _cuobjdump(option: str, compiled: "triton.compiler.CompiledKernel") -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
