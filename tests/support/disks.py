"""Small, full and read-only disks: real ones, where the tests may mount some."""

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory at `folder`, with options of tmpfs; the test is skipped where it may not be."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Disk:
    """An ext4 file system of 200 MB in a file, mounted, that can be lost as a disk or its server is."""

    SHUTDOWN = 0x8004587D  # ext4's ioctl: from now on every call is answered by EIO

    def __init__(self, folder: Path) -> None:
        self.image, self.mount = folder / "image", folder / "mount"
        self.mount.mkdir()
        with self.image.open("wb") as file:
            file.truncate(200 * 2**20)
        self._run("mkfs.ext4", "-q", "-F", str(self.image))
        self.come_back()

    def lose(self) -> None:
        folder = os.open(self.mount, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, self.SHUTDOWN, struct.pack("I", 2))  # and what is not on the disk yet is lost
        finally:
            os.close(folder)

    def come_back(self) -> None:
        self._run("mount", "-o", "loop", str(self.image), str(self.mount))

    def go(self) -> None:
        self._run("umount", "-l", str(self.mount))

    def _run(self, *command: str) -> None:
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no disk can be made here")
