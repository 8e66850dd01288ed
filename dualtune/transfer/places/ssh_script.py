"""What runs on the other machine of a transfer over ssh: POSIX sh and the tools that every Linux and macOS has.

Nothing of dualtune is needed there. Each script is one line without single quotes, backslashes and `!`, so that it can
stand in them whatever the login shell is (csh and fish among them); names of files reach it as arguments alone. It
answers in lines that begin with `dualtune`, and whatever else a login shell prints is passed over.
"""

from __future__ import annotations

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

# FINAL PART TOTAL: make the directory; what is under the final name, and in the part.
LOOK = (
    _HASH + _LIST + f'mkdir -p "${{1%/*}}/" || exit {NO_FILE}; '
    f'if [ -d "$1" ]; then echo "$1: is a directory" >&2; exit {NO_FILE}; fi; '
    'if [ -e "$1" ]; then echo "dualtune there"; if [ "$(($(wc -c <"$1")))" -eq "$3" ]; then list final "$1" "$3"; fi; '
    'fi; if [ -e "$2" ] && [ "$(($(wc -c <"$2")))" -gt "$3" ]; then rm -f "$2"; fi; '
    'if [ -e "$2" ]; then list part "$2" "$3"; fi; ' + _END
)
# PART CHUNK FIRST: what comes in, from chunk FIRST on. dd seeks in units of CHUNK and writes what it gets.
WRITE = f'dd of="$1" bs="$2" seek="$3" conv=notrunc || exit {NO_FILE}; ' + _END
# FINAL PART SHA256 MODE: make the part durable, verify it, name it, and remove the parts of other contents.
FINISH = (
    _HASH + 'if [ -e "$2" ]; then dd if=/dev/null of="$2" conv=notrunc,fsync 2>/dev/null || sync; s=$(h <"$2"); '
    'else s=none; fi; if [ "${s%% *}" = "$3" ]; then '
    f'if [ "$4" = keep ] && [ -e "$1" ]; then echo "$1: is there already" >&2; exit {NO_FILE}; fi; '
    f'mv -f "$2" "$1" || exit {NO_FILE}; rm -f "${{2%-*}}"-*; echo "dualtune done"; '
    'else echo "dualtune differs"; fi; ' + _END
)
# FILE: its size and chunks, or nothing where it is not there.
CHUNKS = _HASH + _LIST + 'if [ -f "$1" ]; then list final "$1" "$(($(wc -c <"$1")))"; fi; ' + _END
# FILE CHUNK FIRST COUNT: these chunks.
READ = 'echo "dualtune data"; dd if="$1" bs="$2" skip="$3" count="$4"'

START_OF_DATA = b"dualtune data\n"


def command(script: str, *arguments: object) -> str:
    """What ssh is to run: one text, which the login shell there takes apart again."""
    return shlex.join(["sh", "-c", script, "dualtune", *map(str, arguments)])
