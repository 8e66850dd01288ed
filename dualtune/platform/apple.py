"""Apple silicon: chip, macOS, Rosetta, and how much unified memory Metal gives to programs, by one call of sysctl."""

from __future__ import annotations

import subprocess

from dualtune.platform.machine import GIB

KEYS = (
    "machdep.cpu.brand_string",
    "kern.osproductversion",  # platform.mac_ver() returns 10.16 in programs that were built for old systems
    "iogpu.wired_limit_mb",
    "sysctl.proc_translated",
    "hw.optional.neon",
    "hw.optional.AdvSIMD",
    "hw.optional.arm.FEAT_BF16",
    "hw.optional.arm.FEAT_SME",
    "hw.optional.avx2_0",
    "hw.optional.avx512f",
)
FEATURES = (  # (key, what it is called)
    ("hw.optional.AdvSIMD", "NEON"),
    ("hw.optional.arm.FEAT_BF16", "NEON bf16"),
    ("hw.optional.arm.FEAT_SME", "SME"),
    ("hw.optional.avx512f", "AVX-512"),
    ("hw.optional.avx2_0", "AVX2"),
)
# Metal's default limit is not published; these shares of the memory are reported lower bounds of its
# recommendedMaxWorkingSetSize. An M5 Max with 128 GiB and macOS 26 has 0.84: github.com/antirez/ds4/pull/893.
SMALL_MEMORY_BYTES, SMALL_SHARE, LARGE_SHARE = 36 * GIB, (2, 3), (3, 4)


def sysctl() -> dict[str, str]:
    """Return the keys that this Mac knows, with their values."""
    try:
        # It reports unknown keys on stderr and still prints the others.
        result = subprocess.run(["sysctl", *KEYS], capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition(":") for line in result.stdout.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def metal_limit(memory_bytes: int, wired_limit_mb: str | None) -> tuple[int, str]:
    """Return the bytes that Metal gives to programs, and their source. `wired_limit_mb`: from sysctl; 0 is unset."""
    if wired_limit_mb and wired_limit_mb.isdigit() and int(wired_limit_mb) > 0:
        return int(wired_limit_mb) * 2**20, f"iogpu.wired_limit_mb is {wired_limit_mb}"
    part, whole = SMALL_SHARE if memory_bytes <= SMALL_MEMORY_BYTES else LARGE_SHARE
    return memory_bytes * part // whole, f"assumed: {part}/{whole} by default"


def features(values: dict[str, str]) -> tuple[str, ...]:
    """Return the CPU features that speed up matrix products."""
    return tuple(name for key, name in FEATURES if values.get(key) == "1")


def is_rosetta(arch: str, values: dict[str, str]) -> bool:
    """Return whether this is an Intel Python that Rosetta translates."""
    apple_chip = "Apple" in values.get("machdep.cpu.brand_string", "")
    return values.get("sysctl.proc_translated") == "1" or (arch == "x86_64" and apple_chip)
