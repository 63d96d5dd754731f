"""Byte-range locks that the kernel releases when their holder dies, however it dies.

Open-file-description locks: they belong to the open file, not to the process, so that sender and receiver may
live in one process, and no process id has to be trusted. A lock never blocks here.
"""

import errno
import fcntl
import struct

# struct flock: l_type, l_whence, l_start, l_len, l_pid; native alignment pads it as the C compiler does.
_FLOCK = "hhqqi0q"


def try_lock(fd: int, byte: int, *, shared: bool = False) -> bool:
    """Lock one byte of a file until `fd` is closed or its last holder is dead; False if it is taken.

    A `shared` lock is taken only for those who want it for themselves.
    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, 0, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, byte: int) -> None:
    """Give the lock of one byte back."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, 0, byte, 1, 0))


def is_locked(fd: int, byte: int) -> bool:
    """Whether another open file holds the lock of this byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, byte, 1, 0))
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
