"""The scripts that run on the remote machine over ssh: POSIX sh and the tools that every Linux and macOS has.

dualtune is not needed there. The login shell may be any, and shells differ in quoting: in fish a backslash inside
single quotes escapes the closing one. So a script is one line without single quotes, backslashes and `!`, which all
shells pass on unchanged between single quotes, and the arguments (such as file names) contain only letters, digits,
`_./-` and octal codes. A script answers in lines that begin with `dualtune`; any other output of a login shell is
ignored.

A part is a directory `.NAME.part-HASH` with mode 0700, with the bytes in a file `data`: sh cannot open a file without
following a link, but nobody else can create a link in this directory.
"""

from __future__ import annotations

import os
import re
import shlex

NO_TOOL, NO_FILE = 69, 73  # exit codes: EX_UNAVAILABLE and EX_CANTCREAT of sysexits.h

_HASH = (
    "LC_ALL=C; export LC_ALL; "
    "if command -v sha256sum >/dev/null 2>&1; then h() { sha256sum; }; "
    "elif command -v shasum >/dev/null 2>&1; then h() { shasum -a 256; }; "
    "elif command -v openssl >/dev/null 2>&1; then h() { openssl dgst -sha256 -r; }; "
    f'else echo "sha256sum, shasum or openssl is needed, and none is installed" >&2; exit {NO_TOOL}; fi; '
)
# list WHAT FILE TOTAL: the hashes of the file's chunks, in the chunk size of a file of TOTAL bytes (see `chunks`).
_LIST = (
    'list() { [ -r "$2" ] || { echo "$2: cannot be read" >&2; exit 73; }; '
    'n=$(($(wc -c <"$2"))); c=262144; '
    'while [ "$c" -lt 8388608 ] && [ "$((c * 256))" -lt "$3" ]; do c=$((c * 2)); done; '
    'echo "dualtune $1 bytes $n"; i=0; while [ "$((i * c))" -lt "$n" ]; do '
    'echo "dualtune $1 chunk $(dd if="$2" bs="$c" skip="$i" count=1 2>/dev/null | h)"; i=$((i + 1)); done; }; '
)
_END = 'echo "dualtune end"'

# absolute PATH: set $p to the absolute path, without resolving links in its directories.
_ABSOLUTE = 'absolute() { case "$1" in /*) p=$1;; *) p=$PWD/$1;; esac; }; '
# enter PART: make it and cd into it. A non-directory is replaced; a directory of another user, or a link, is refused.
_ENTER = (
    _ABSOLUTE + 'enter() { absolute "$1"; if [ -L "$p" ]; then rm -f "$p"; fi; [ -d "$p" ] || rm -f "$p"; '
    'mkdir -m 700 "$p" 2>/dev/null; cd -P "$p" && [ "${PWD##*/}" = "${p##*/}" ] && [ -O . ] || '
    f'{{ echo "$p: is not your directory; remove it" >&2; exit {NO_FILE}; }}; }}; '
)
_REFUSE_DIRECTORY = f'if [ -d "$1" ]; then echo "$1: is a directory" >&2; exit {NO_FILE}; fi; '

# FINAL PART TOTAL: make the directory; list what is under the final name, and in the part.
LOOK = (
    _HASH + _LIST + _ENTER + f'mkdir -p "${{1%/*}}/" || exit {NO_FILE}; ' + _REFUSE_DIRECTORY + 'if [ -e "$1" ] || '
    '[ -L "$1" ]; then echo "dualtune there"; if [ -f "$1" ] && [ "$(($(wc -c <"$1")))" -eq "$3" ]; then '
    'list final "$1" "$3"; fi; fi; '
    'if [ -L "$2" ]; then :; elif [ -d "$2" ]; then enter "$2"; '
    'if [ -f data ] && [ "$(($(wc -c <data)))" -gt "$3" ]; then rm -f data; fi; '
    'if [ -f data ]; then list part data "$3"; fi; fi; ' + _END
)
# PART CHUNK FIRST: write standard input, from chunk FIRST on. dd seeks in units of CHUNK.
WRITE = _ENTER + f'enter "$1"; dd of=data bs="$2" seek="$3" conv=notrunc || exit {NO_FILE}; ' + _END
# FINAL PART SHA256 MODE: sync the part, verify it, rename it, and remove parts with other content.
FINISH = (
    _HASH + _ENTER + _REFUSE_DIRECTORY + 'absolute "$1"; f=$p; enter "$2"; '
    "if [ -f data ]; then dd if=/dev/null of=data conv=notrunc,fsync 2>/dev/null || sync; s=$(h <data); "
    'else s=none; fi; if [ "${s%% *}" = "$3" ]; then '
    f'if [ "$4" = keep ] && {{ [ -e "$f" ] || [ -L "$f" ]; }}; then '
    f'echo "$1: already exists" >&2; exit {NO_FILE}; fi; '
    f'mv -f data "$f" || exit {NO_FILE}; cd / && rm -rf "${{p%-*}}"-*; echo "dualtune done"; '
    'else echo "dualtune differs"; fi; ' + _END
)
# FILE: its size and chunks, or nothing if it does not exist.
CHUNKS = _HASH + _LIST + 'if [ -f "$1" ]; then list final "$1" "$(($(wc -c <"$1")))"; fi; ' + _END
# FILE CHUNK FIRST COUNT: these chunks.
READ = 'echo "dualtune data"; dd if="$1" bs="$2" skip="$3" count="$4"'

START_OF_DATA = b"dualtune data\n"
_DECODE = 'for a do shift; a=$(printf %b. "$a"); set -- "$@" "${a%.}"; done; '
_TO_ENCODE = re.compile(rb"[^A-Za-z0-9_./-]")


def command(script: str, *arguments: object) -> str:
    """Return the command for ssh: one text, which the remote login shell parses."""
    return shlex.join(["sh", "-c", _DECODE + script, "dualtune", *map(_encoded, arguments)])


def _encoded(argument: object) -> str:
    """Encode an argument for `printf %b`: a code such as \\0047 for each byte that a shell might interpret."""
    return _TO_ENCODE.sub(lambda byte: b"\\0%03o" % byte[0][0], os.fsencode(str(argument))).decode("ascii")
