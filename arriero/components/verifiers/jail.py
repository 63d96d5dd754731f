"""The inside of the sandbox: a fresh interpreter that locks itself up, then runs a program it was given.

Started by `sandbox.run_program` as a script, alone: it imports the standard library only. In order: limits,
a user of no rank, namespaces (files, network, processes, host name, shared memory), a root file system with
the interpreter's own files read-only and an empty `/tmp`, no capabilities, a seccomp filter. What fails is
told on the status pipe and nothing runs; "ok" on it means that all of it holds.

    descriptors: 0 input, 1 and 2 output, `status` (pipe), `program` (its source)
"""

# pathlib takes longer to import than all the rest.
# ruff: noqa: PTH100, PTH103, PTH106, PTH110, PTH114, PTH115, PTH120, PTH211

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
NEW_USER = 0x10000000
NOBODY = 65534
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 22, 38
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

# System calls by name: (x86_64, aarch64); None where there is none. Numbers: the kernel's unistd tables.
NEVER: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112), "personality": (135, 92),
    "quotactl": (179, 60), "kcmp": (312, 272), "sethostname": (170, 161), "setdomainname": (171, 162),
    "syslog": (103, 116), "iopl": (172, None), "ioperm": (173, None), "pidfd_getfd": (438, 438),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "clone3": (435, 435),
    "openat2": (437, 437),
}  # fmt: skip
# Where namespaces don't hide the files and the other processes of the user.
NEVER_OUTSIDE: dict[str, tuple[int | None, int | None]] = {
    "creat": (85, None), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None),
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None),
    "symlinkat": (266, 36), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "fchownat": (260, 54), "truncate": (76, 45), "mknod": (133, None), "mknodat": (259, 33),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "shmget": (29, 194), "shmat": (30, 196),
    "fork": (57, None), "vfork": (58, None),
}  # fmt: skip
# (number, which argument, bits): refused if one of the bits is set.
THREAD = 0x00010000
NEW_ROOMS = {"clone": ((56, 220), 0, NEW_NAMESPACES | 0x02000000)}
WRITES = {
    "open": ((2, None), 1, WRITING), "openat": ((257, 56), 2, WRITING),
    "prlimit64": ((302, 261), 0, 0xFFFFFFFF),
}  # fmt: skip
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Lock up, fork, and run the program; exit as it did."""
    status, program, asked = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    with os.fdopen(program, encoding="utf-8") as file:
        source = file.read()
    try:
        inner = lock_up(asked)
    except (OSError, ValueError) as error:
        os.write(status, str(error).encode()[:1000])
        sys.exit(70)
    if inner:
        os.close(status)
        os.closerange(0, 3)
        _, code = os.waitpid(inner, 0)
        exit_like(code)
    os.write(status, b"ok")
    os.close(status)
    sys.argv = ["program"]
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [os.path.realpath(p) for p in sys.path if p != here]
    for name in ("libc", "json"):
        globals().pop(name, None)
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})


def lock_up(asked: dict[str, object]) -> int:
    """All of the sandbox. The process id of the one that goes on in it, 0 in that one. Raises OSError."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    limit(asked)
    outer = os.getpid()
    if asked["namespaces"]:
        root = enter_namespaces()
        if inner := os.fork():
            return inner
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        new_root(readable(bool(asked["packages"])), int(str(asked["disk_mb"])))
        number = int(str(asked["processes"]))
        resource.setrlimit(resource.RLIMIT_NPROC, (number, number))
        if root:  # a user of its own, or it would share the limit on processes
            become(20_000 + outer % 40_000)
    elif os.getuid() == 0:
        become(NOBODY)
        if not os.access(os.path.dirname(os.__file__), os.R_OK | os.X_OK):
            raise OSError(f"{os.path.dirname(os.__file__)} can't be read without being root")
    drop_capabilities()
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filter_calls(outside=not asked["namespaces"])
    return 0


def enter_namespaces() -> bool:
    """New namespaces; whether the process is still root of the machine. Raises OSError."""
    if os.getuid() == 0:
        try:
            call("unshare", NEW_NAMESPACES & ~NEW_USER)
            return True
        except OSError:  # root of a container, perhaps; a user's namespace may still be allowed
            become(NOBODY)
    user, group = os.getuid(), os.getgid()
    call("unshare", NEW_NAMESPACES)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"1000 {user} 1")
    write("/proc/self/gid_map", f"1000 {group} 1")
    return False


def become(user: int) -> None:
    """Give up the rank of root: it could read everything, and no limit on processes holds for it."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(user, user, user)
    call("prctl", PR_SET_DUMPABLE, 1)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)


def limit(asked: dict[str, object]) -> None:
    """Resource limits, each of one process."""
    megabytes = int(str(asked["memory_mb"])) << 20
    cpu_s = max(1, int(float(str(asked["time_s"])) + 1))
    for which, most in (
        (resource.RLIMIT_AS, megabytes), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, int(str(asked["disk_mb"])) << 20), (resource.RLIMIT_NOFILE, 64),
    ):  # fmt: skip
        resource.setrlimit(which, (most, most))


def readable(packages: bool) -> list[str]:
    """What the interpreter needs of the file system."""
    found = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", *{os.path.dirname(os.__file__)}]
    if packages:
        found += [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    return sorted({os.path.realpath(p) for p in found}, key=len)


def new_root(paths: list[str], disk_mb: int) -> None:
    """A root of nothing but `paths` and devices, read-only, and an empty /tmp."""
    # By descriptor: one of them may lie below /tmp, where the new root is built.
    sources = {p: os.open(p, os.O_PATH) for p in [*paths, *DEVICES] if os.path.exists(p)}
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    # Before the others: what lies below /tmp outside is bound into the one that can be written.
    os.makedirs("/tmp/tmp")
    mount("tmpfs", "/tmp/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_mb}m,nr_inodes=1k,mode=777")
    for path, source in sources.items():
        target, device = "/tmp" + path, path in DEVICES
        if os.path.exists(target):  # inside one that is there already
            continue
        os.makedirs(os.path.dirname(target) if device else target, exist_ok=True)
        if device:
            write(target, "")
        mount(f"/proc/self/fd/{source}", target, "", MS_BIND | (0 if device else MS_REC))
        if not device:
            mount("none", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
        os.close(source)
    for link in ("/lib", "/lib64"):
        if os.path.islink(link):
            os.symlink(os.readlink(link), "/tmp" + link)
    os.makedirs("/tmp/old")
    os.chdir("/tmp")
    call("syscall", {"x86_64": 155, "aarch64": 41}[platform.machine()], b".", b"old")
    os.chdir("/tmp")
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    mount("none", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def drop_capabilities() -> None:
    """None left, and none to be had."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6))


def filter_calls(*, outside: bool) -> None:
    """The seccomp filter. `outside`: the files of the machine are in sight, so none may be written."""
    which, audit = ARCHITECTURES.get(platform.machine(), (None, 0))
    if which is None:
        raise OSError(f"no seccomp filter for {platform.machine()}")
    refuse = 0x00050000 | 1  # EPERM
    lines = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (0x06, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
    if which == 0:
        lines += [(0x35, 0, 1, 0x40000000), (0x06, 0, 0, 0x80000000)]  # the x32 numbers
    never = {**NEVER, **(NEVER_OUTSIDE if outside else {})}
    for name, numbers in never.items():
        if (number := numbers[which]) is not None:
            # ENOSYS: the C library then uses clone, whose flags can be seen.
            answer = 0x00050000 | 38 if name == "clone3" else refuse
            lines += [(0x15, 0, 1, number), (0x06, 0, 0, answer)]
    for numbers, argument, bits in {**NEW_ROOMS, **(WRITES if outside else {})}.values():
        if (number := numbers[which]) is not None:
            lines += [
                (0x15, 0, 4, number), (0x20, 0, 0, 16 + 8 * argument), (0x45, 0, 1, bits),
                (0x06, 0, 0, refuse), (0x20, 0, 0, 0),
            ]  # fmt: skip
    if outside:  # threads, but no processes: nothing would count them
        clone = (56, 220)[which]
        lines += [(0x15, 0, 3, clone), (0x20, 0, 0, 16), (0x45, 1, 0, THREAD), (0x06, 0, 0, refuse)]
    lines.append((0x06, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code))
    call("prctl", PR_SET_SECCOMP, 2, program, 0, 0)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def write(path: str, text: str) -> None:
    """The text as the file's content."""
    # Not open(): it may import a module for the encoding, whose file this user may be unable to reach.
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(file, text.encode())
    os.close(file)


def call(name: str, *arguments: object) -> None:
    """A function of the C library. Raises OSError with its name."""
    if getattr(libc, name)(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def exit_like(code: int) -> None:
    """End as the process with this wait status ended."""
    if os.WIFSIGNALED(code):
        os._exit(128 + os.WTERMSIG(code))
    os._exit(os.WEXITSTATUS(code))


if __name__ == "__main__":
    main()
