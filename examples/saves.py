"""What saves look like from outside, on a local disk: begun, being written, decided."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SaveOnDisk:
    """One save in an iteration directory.

    Attributes:
        directory: the iteration directory.
        save_id: which save in it.
    """

    directory: Path
    save_id: str

    @property
    def iteration(self) -> int:
        """The iteration it saves."""
        return int(self.directory.name.removeprefix("iter_"))

    @property
    def decided(self) -> bool:
        """Whether its decision exists: before that, there is no checkpoint."""
        return (self.directory / ".ckpt" / self.save_id / "decision.json").exists()

    def unfinished(self, ranks: int) -> bool:
        """Whether it is in the middle: data is on disk, not every one of its `ranks` ranks has recorded its own, and
        nobody has decided. (With all records there, the next attempt would rightly commit it.)"""
        written = sum(path.stat().st_size for path in self.data_files())
        return written > 0 and len(self._records()) < ranks and not self.decided

    def recorded_shard(self) -> Path | None:
        """A shard file that is complete and durable, its digest recorded, in a save that is not decided yet."""
        for record in self._records():
            rank = record.stem.removeprefix("rank_")
            shards = list(self.directory.glob(f"__{rank}_*.{self.save_id}.distcp"))
            if shards and not self.decided:
                return shards[0]
        return None

    def data_files(self) -> list[Path]:
        """The shard files that exist so far."""
        return sorted(self.directory.glob(f"__*.{self.save_id}.distcp"))

    def _records(self) -> list[Path]:
        return sorted((self.directory / ".ckpt" / self.save_id).glob("rank_*.json"), reverse=True)

    def files(self) -> list[Path]:
        """Everything it has written so far."""
        return self.data_files() + sorted((self.directory / ".ckpt" / self.save_id).iterdir())


def begun_saves(root: Path) -> list[SaveOnDisk]:
    """Every save of a run that has begun, oldest first."""
    found = [SaveOnDisk(path.parents[2], path.parent.name) for path in root.glob("iter_*/.ckpt/*/begin.json")]
    return sorted(found, key=lambda save: save.save_id)


def flip_byte(path: Path) -> int:
    """Inverts one byte in the middle of a file and returns its offset. The file keeps its size and its times."""
    status = path.stat()
    offset = status.st_size // 2
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))
    return offset
