"""Loops in LLVM's own language, for `vectors`."""

from typing import Any, Final

from llvmlite import ir

_I64: Final = ir.IntType(64)


class Loop:
    """A loop being written: `index` is the round, `carried` what the round begins with; `carry` says what is next."""

    def __init__(self, builder: Any, count: Any, starts: list[Any]) -> None:
        self._builder = builder
        self._count = count
        before = builder.block
        self._body = builder.append_basic_block("loop")
        self._next: list[Any] = []
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(_I64)
        self.index.add_incoming(_I64(0), before)
        self.carried = [builder.phi(start.type) for start in starts]
        for phi, start in zip(self.carried, starts, strict=True):
            phi.add_incoming(start, before)

    def carry(self, *values: Any) -> None:
        """What the next round begins with; after the last round it is `results`."""
        self._next = list(values)

    @property
    def results(self) -> list[Any]:
        """What the last round handed on."""
        return self._next

    def close(self) -> None:
        """End the loop; what is written from now on comes after it."""
        end_of_body = self._builder.block
        index = self._builder.add(self.index, _I64(1))
        self.index.add_incoming(index, end_of_body)
        for phi, value in zip(self.carried, self._next, strict=True):
            phi.add_incoming(value, end_of_body)
        after = self._builder.append_basic_block("after")
        self._builder.cbranch(self._builder.icmp_signed("<", index, self._count), self._body, after)
        self._builder.position_at_end(after)
