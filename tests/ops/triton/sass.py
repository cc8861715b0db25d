"""What the code of a GPU, as nvdisasm prints it, tells of spills, and of products that read registers.

Assemblers before CUDA 13.3 get these wrong in two ways: they write to the registers while a product
is still running, and they forget that a loop needs them again (docs/kernels.md).
"""

import re
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_x_\w+)\)")
_FROM_REGISTERS = re.compile(r"R\d+, R(\d+)")
_FIRST_REGISTER = re.compile(r"(?:!?U?P[\dT]+, )*R(\d+)\b")
# Of instructions that write to no register of the kind that products read.
_WRITES_NONE = (
    *("ST", "RED", "BAR", "BRA", "EXIT", "MEMBAR", "FENCE", "WARP", "LDGSTS", "LDGDEPBAR", "DEPBAR", "NOP"),
    *("ISETP", "FSETP", "PLOP", "VOTE", "CCTL", "ERRBAR", "R2UR", "BSYNC", "BSSY", "RET", "CALL", "U"),
    *("S2UR", "SYNCS"),
)  # fmt: skip
# What brings a value back from where it was kept.
_RESTORES = ("LDL", "LDSM", "LDS", "MOV", "IMAD.MOV")
_OPERAND = 4  # registers


class Instruction(NamedTuple):
    address: str
    predicate: str | None
    name: str
    arguments: str

    @property
    def operand(self) -> range:
        """The registers that a product reads beside its accumulator."""
        found = _FROM_REGISTERS.match(self.arguments) if self.name.startswith("HGMMA") else None
        return range(int(found[1]), int(found[1]) + _OPERAND) if found else range(0)

    @property
    def written(self) -> range:
        found = _FIRST_REGISTER.match(self.arguments)
        if not found or self.name.startswith(_WRITES_NONE):
            return range(0)
        count = 1
        if ".64" in self.name or ".WIDE" in self.name or self.name.endswith("88.2") or self.name == "CS2R":
            count = 2
        if ".128" in self.name or self.name.endswith("88.4"):
            count = 4
        if self.name.startswith("HGMMA"):
            count = int(self.name.split("x")[1]) // 2
        return range(int(found[1]), int(found[1]) + count)


class Program:
    """Instructions, and which may follow each."""

    def __init__(self, printed: str) -> None:
        self.code: list[Instruction] = []
        labels: dict[str, int] = {}
        for line in printed.splitlines():
            if found := _INSTRUCTION.match(line):
                self.code.append(Instruction(*found.groups()))
            elif found := _LABEL.match(line):
                labels[found[1]] = len(self.code)
        self.followers = [list(self._followers(place, labels)) for place in range(len(self.code))]

    def _followers(self, place: int, labels: dict[str, int]) -> Iterable[int]:
        instruction = self.code[place]
        jumps, may_stay = instruction.name == "BRA", instruction.predicate is not None
        if jumps:
            yield from (labels[label] for label in _TARGET.findall(instruction.arguments))
            may_stay = may_stay or bool(re.match("!?U?P", instruction.arguments))
        if may_stay or not (jumps or instruction.name == "EXIT"):
            yield from range(place + 1, min(place + 2, len(self.code)))

    def back(self, place: int) -> list[int]:
        """Where a jump goes back to."""
        return [follower for follower in self.followers[place] if follower <= place]

    def writers(
        self, starts: Iterable[int], registers: set[int], end: int | None = None
    ) -> list[dict[int, set]]:
        """For each place and register who may have written last, on paths from `starts` that end at `end`."""
        found: list[dict[int, set]] = [{} for _ in self.code]
        reached, waiting = set(starts), deque(starts)
        while waiting:
            place = waiting.popleft()
            if place == end:
                continue
            after = found[place]
            if own := registers.intersection(self.code[place].written):
                kept = after if self.code[place].predicate else {}
                after = after | {register: {place} | kept.get(register, set()) for register in own}
            for follower in self.followers[place]:
                before = found[follower]
                more = [register for register in after if not after[register] <= before.get(register, set())]
                for register in more:
                    before[register] = before.get(register, set()) | after[register]
                if more or follower not in reached:
                    reached.add(follower)
                    waiting.append(follower)
        return found


def running(printed: str) -> int:
    """How many asynchronous products a wait leaves running at most, in code where some read registers."""
    if not re.search(r"HGMMA\S* R\d+, R\d+", printed):
        return 0
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", printed)
    return max(int(left, 16) for left in waits)


def rewritten(printed: str) -> list[str]:
    """Products whose registers something else is written to before they are waited for: their addresses."""
    program = Program(printed)
    wrong = []
    for place, instruction in enumerate(program.code):
        operand = set(instruction.operand)
        reached = set(program.followers[place]) if operand else set()
        waiting = deque(reached)
        while waiting:
            follower = waiting.popleft()
            if program.code[follower].name.startswith("WARPGROUP.DEPBAR"):
                continue
            if operand.intersection(program.code[follower].written):
                wrong.append(instruction.address)
                break
            more = set(program.followers[follower]) - reached
            reached |= more
            waiting.extend(more)
    return wrong


def overwritten(printed: str) -> list[str]:
    """Products that find something else in their registers the second time round: their addresses.

    What such a product reads was written before a loop or at its beginning; what is written later in the loop
    is meant for others, unless it brings the value back.
    """
    program = Program(printed)
    products = [place for place, instruction in enumerate(program.code) if instruction.operand]
    registers = {register for place in products for register in program.code[place].operand}
    writers = program.writers([0], registers) if products else []
    wrong = []
    for place in products:
        operand = set(program.code[place].operand)
        if all(len(writers[place].get(register, ())) < 2 for register in operand):
            continue
        first = program.writers([0], operand, place)[place]
        again = program.writers(program.followers[place], operand, place)[place]
        late = {writer for register, found in again.items() for writer in found - first.get(register, set())}
        if any(not program.code[writer].name.startswith(_RESTORES) for writer in late):
            wrong.append(program.code[place].address)
    return wrong


def serialized(printed: str) -> bool:
    """Whether each product is waited for alone: an assembler's way out of too few registers."""
    products = [x.arguments for x in Program(printed).code if x.name.startswith("HGMMA")]
    return bool(products) and all("gsb0" in arguments for arguments in products)


def reloaded(printed: str) -> int:
    """How often the longest loop, which is the one over tiles, loads registers that were spilled.

    It counts more than how many are: most of what is spilled before a loop is needed in it once or never.
    """
    program = Program(printed)
    loops: list[list[int]] = []
    for start, end in sorted(
        (min(back), place) for place in range(len(program.code)) if (back := program.back(place))
    ):
        if loops and start <= loops[-1][1]:
            loops[-1][1] = max(loops[-1][1], end)  # within the one before, or behind its longest branch
        else:
            loops.append([start, end])
    first, last = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    return sum(instruction.name.startswith("LDL") for instruction in program.code[first : last + 1])
