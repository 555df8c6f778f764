"""A filter of system calls for programs in the sandbox, as the kernel's classic BPF.

What no honest program of this kind asks for and hostile ones could use is refused: new namespaces,
mounts, tracing, keys, kernel modules, io_uring, memory outside of the limits (memfd, System V shared
memory), limits of other processes, and every family of sockets but Unix and IP (a virtual machine's
vsock is in no network namespace).
"""

from __future__ import annotations

import platform
import struct

_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 0x00050001, 0x00050026, 0x00050061
_LOAD, _JUMP_EQUAL, _JUMP_FROM, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NEW_NAMESPACES = 0x7E020000
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16  # offsets into struct seccomp_data: call, architecture, first argument

# clone, clone3, prlimit64, socket; then what is refused outright: ptrace unshare setns mount umount2
# pivot_root chroot add_key request_key keyctl bpf perf_event_open userfaultfd process_vm_readv
# process_vm_writev memfd_create shmget msgget semget kexec_load init_module finit_module delete_module
# open_by_handle_at name_to_handle_at swapon reboot acct quotactl syslog kcmp move_pages mq_open.
_X86 = (0xC000003E, (56, 435, 302, 41))
_X86_REFUSED = (101, 272, 308, 165, 166, 155, 161, 248, 249, 250, 321, 298, 323, 310, 311, 319, 29, 68, 64)
_X86_REFUSED += (246, 175, 313, 176, 304, 303, 167, 169, 163, 179, 103, 312, 279, 240)
_ARM = (0xC00000B7, (220, 435, 261, 198))
_ARM_REFUSED = (117, 97, 268, 40, 39, 41, 51, 217, 218, 219, 280, 241, 282, 270, 271, 279, 194, 186, 190)
_ARM_REFUSED += (104, 105, 273, 106, 265, 264, 224, 142, 89, 60, 116, 272, 239, 180)
# The same everywhere: io_uring (3), open_tree to fspick, pidfd_getfd, mount_setattr, memfd_secret.
_BOTH_REFUSED = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)


def seccomp_filter() -> bytes | None:
    """The filter for this machine, or None where its processor is not known here."""
    machine = platform.machine()
    if machine == "x86_64":
        return _compile(*_X86, _X86_REFUSED + _BOTH_REFUSED)
    if machine == "aarch64":
        return _compile(*_ARM, _ARM_REFUSED + _BOTH_REFUSED)
    return None


def _compile(architecture: int, special: tuple[int, int, int, int], refused: tuple[int, ...]) -> bytes:
    clone, clone3, prlimit, socket = special
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_JUMP_EQUAL, architecture, yes=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_JUMP_FROM, 0x40000000, no=1),  # x86's other table of calls, x32
        _line(_RETURN, _EPERM),
        _line(_JUMP_EQUAL, clone3, no=1),  # its flags cannot be seen; the C library falls back to clone
        _line(_RETURN, _ENOSYS),
    ]
    for number in refused:
        lines += [_line(_JUMP_EQUAL, number, no=1), _line(_RETURN, _EPERM)]
    lines += [
        _line(_JUMP_EQUAL, clone, no=4),
        _line(_LOAD, _FIRST),
        _line(_JUMP_ANY_BIT, _NEW_NAMESPACES, no=1),
        _line(_RETURN, _EPERM),
        _line(_RETURN, _ALLOW),
        _line(_JUMP_EQUAL, prlimit, no=4),
        _line(_LOAD, _FIRST),
        _line(_JUMP_EQUAL, 0, yes=1),  # its own limits, which cannot be raised
        _line(_RETURN, _EPERM),
        _line(_RETURN, _ALLOW),
        _line(_JUMP_EQUAL, socket, yes=1),
        _line(_RETURN, _ALLOW),
        _line(_LOAD, _FIRST),
    ]
    for index, family in enumerate(_FAMILIES):
        lines.append(_line(_JUMP_EQUAL, family, yes=len(_FAMILIES) - index))
    lines += [_line(_RETURN, _EAFNOSUPPORT), _line(_RETURN, _ALLOW)]
    return b"".join(lines)


def _line(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction: how many instructions to skip if a jump's test holds, and if it does not."""
    return struct.pack("=HBBI", code, yes, no, value)
