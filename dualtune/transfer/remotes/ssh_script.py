"""What runs on the other machine of a transfer over ssh: POSIX sh and the tools that every Linux and macOS has.

Nothing of dualtune is needed there. The login shell there may be any, and shells disagree about quotes: in fish a
backslash inside single quotes hides the closing one. So a script is one line without single quotes, backslashes and
`!`, which all shells pass on as it is between single quotes, and the arguments (names of files among them) are written
with letters, digits, `_./-` and octal codes alone. A script answers in lines that begin with `dualtune`, and whatever
else a login shell prints is passed over.

A part is a directory with mode 0700, `.NAME.part-HASH`, and the bytes are in a file `data` in it: sh cannot open a file
without following a link, but where nobody else may write, nobody can plant one.
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
    f'else echo "sha256sum, shasum or openssl is needed there, and none is installed" >&2; exit {NO_TOOL}; fi; '
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

# absolute PATH: it as $p, with the links of the directories above it.
_ABSOLUTE = 'absolute() { case "$1" in /*) p=$1;; *) p=$PWD/$1;; esac; }; '
# enter PART: make it, and go in. What is no directory makes room; one of somebody else, or behind a link, is refused.
_ENTER = (
    _ABSOLUTE + 'enter() { absolute "$1"; if [ -L "$p" ]; then rm -f "$p"; fi; [ -d "$p" ] || rm -f "$p"; '
    'mkdir -m 700 "$p" 2>/dev/null; cd -P "$p" && [ "${PWD##*/}" = "${p##*/}" ] && [ -O . ] || '
    f'{{ echo "$p: is not a directory of yours; remove it" >&2; exit {NO_FILE}; }}; }}; '
)
_REFUSE_DIRECTORY = f'if [ -d "$1" ]; then echo "$1: is a directory" >&2; exit {NO_FILE}; fi; '

# FINAL PART TOTAL: make the directory; what is under the final name, and in the part.
LOOK = (
    _HASH + _LIST + _ENTER + f'mkdir -p "${{1%/*}}/" || exit {NO_FILE}; ' + _REFUSE_DIRECTORY + 'if [ -e "$1" ] || '
    '[ -L "$1" ]; then echo "dualtune there"; if [ -f "$1" ] && [ "$(($(wc -c <"$1")))" -eq "$3" ]; then '
    'list final "$1" "$3"; fi; fi; '
    'if [ -L "$2" ]; then :; elif [ -d "$2" ]; then enter "$2"; '
    'if [ -f data ] && [ "$(($(wc -c <data)))" -gt "$3" ]; then rm -f data; fi; '
    'if [ -f data ]; then list part data "$3"; fi; fi; ' + _END
)
# PART CHUNK FIRST: what comes in, from chunk FIRST on. dd seeks in units of CHUNK and writes what it gets.
WRITE = _ENTER + f'enter "$1"; dd of=data bs="$2" seek="$3" conv=notrunc || exit {NO_FILE}; ' + _END
# FINAL PART SHA256 MODE: make the part durable, verify it, name it, and remove the parts of other contents.
FINISH = (
    _HASH + _ENTER + _REFUSE_DIRECTORY + 'absolute "$1"; f=$p; enter "$2"; '
    "if [ -f data ]; then dd if=/dev/null of=data conv=notrunc,fsync 2>/dev/null || sync; s=$(h <data); "
    'else s=none; fi; if [ "${s%% *}" = "$3" ]; then '
    f'if [ "$4" = keep ] && {{ [ -e "$f" ] || [ -L "$f" ]; }}; then '
    f'echo "$1: is there already" >&2; exit {NO_FILE}; fi; '
    f'mv -f data "$f" || exit {NO_FILE}; cd / && rm -rf "${{p%-*}}"-*; echo "dualtune done"; '
    'else echo "dualtune differs"; fi; ' + _END
)
# FILE: its size and chunks, or nothing where it is not there.
CHUNKS = _HASH + _LIST + 'if [ -f "$1" ]; then list final "$1" "$(($(wc -c <"$1")))"; fi; ' + _END
# FILE CHUNK FIRST COUNT: these chunks.
READ = 'echo "dualtune data"; dd if="$1" bs="$2" skip="$3" count="$4"'

START_OF_DATA = b"dualtune data\n"
_DECODE = 'for a do shift; a=$(printf %b. "$a"); set -- "$@" "${a%.}"; done; '
_TO_ENCODE = re.compile(rb"[^A-Za-z0-9_./-]")


def command(script: str, *arguments: object) -> str:
    """What ssh is to run: one text, which the login shell there takes apart again."""
    return shlex.join(["sh", "-c", _DECODE + script, "dualtune", *map(_encoded, arguments)])


def _encoded(argument: object) -> str:
    """The argument as `printf %b` reads it: a code such as \\0047 in place of each byte that a shell might read."""
    return _TO_ENCODE.sub(lambda byte: b"\\0%03o" % byte[0][0], os.fsencode(str(argument))).decode("ascii")
