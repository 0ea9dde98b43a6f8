"""Bit reader for the headers of bitstreams."""

from __future__ import annotations

from dali_stream.errors import DecodeError


class Bits:
    """Reader of the bits of a header. Its methods raise `DecodeError` if the header is truncated.

    Args:
        data: Bytes of the header.
        name: Name of the header, for messages.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._data, self._name, self._at = data, name, 0

    def take(self, count: int) -> int:
        """Return the next `count` bits as a number, with the most significant bit first (`u(n)`)."""
        stop = self._at + count
        if stop > 8 * len(self._data):
            raise DecodeError(f"invalid {self._name}: truncated")
        last = (stop + 7) >> 3
        value = int.from_bytes(self._data[self._at >> 3 : last], "big") >> (8 * last - stop)
        self._at = stop
        return value & ((1 << count) - 1)

    def flag(self) -> bool:
        """Return whether the next bit is 1."""
        return bool(self.take(1))

    def number(self, name: str, most: int = (1 << 32) - 2) -> int:
        """Return a number in exponential Golomb code (`ue(v)`, 9.1 in H.264).

        Args:
            name: Name of the number, for messages.
            most: Largest allowed value. Default: 2^32 - 2, the largest value of the code.

        Raises:
            DecodeError: If the number is larger than `most`.
        """
        zeros = 0
        while not self.flag():
            zeros += 1
            if zeros > 32:
                raise DecodeError(f"invalid {self._name}: {name} has more than 32 zero bits")
        value = (1 << zeros) - 1 + self.take(zeros)
        if value > most:
            raise DecodeError(f"invalid {self._name}: {name} must be at most {most}, got {value}")
        return value

    def skip_numbers(self, count: int) -> None:
        """Skip `count` numbers in exponential Golomb code, signed or not."""
        for _ in range(count):
            self.number("value")

    def data(self, count: int) -> bytes:
        """Return the next `count` bytes. The position must be at the beginning of a byte."""
        start = self._at >> 3
        stop = start + count
        if stop > len(self._data):
            raise DecodeError(f"invalid {self._name}: truncated")
        self._at = 8 * stop
        return self._data[start:stop]

    def rest(self) -> bytes:
        """Return the remaining bytes. The position must be at the beginning of a byte."""
        return self._data[self._at >> 3 :]
