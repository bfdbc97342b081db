"""Step times of one family as arrays."""

from dataclasses import dataclass

from fitting.numerics.arrays import BoolArray, FloatArray, IntArray, NameArray


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Timed steps of one family, a row for each timing of a batch size.

    Attributes:
        gpu: (rows,) GPU and its stack.
        series: (rows,) GPU at a length or a data set: one curve for each sparsity.
        batch_size: (rows,) examples per step.
        tokens: (rows,) padded tokens per step.
        sparsity: (rows,) active experts over experts; 1 without experts.
        seconds: (rows,) seconds per step.
    """

    gpu: NameArray
    series: NameArray
    batch_size: FloatArray
    tokens: FloatArray
    sparsity: FloatArray
    seconds: FloatArray

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, rows: BoolArray | IntArray) -> "StepTimes":
        """Select rows by a mask or by places."""
        return StepTimes(*(getattr(self, name)[rows] for name in StepTimes.__slots__))
