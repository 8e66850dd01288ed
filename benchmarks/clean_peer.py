"""Near duplicates by rensa, for benchmarks/clean.py, in an environment that has it: lines of JSON texts in, flags out.

    PYTHON benchmarks/clean_peer.py THRESHOLD < texts.jsonl

Shingles are those of dualtune: 5 characters, without case, runs of spaces as one. Its deduplicator keeps the first row.
"""

import json
import sys
import time

from rensa import RMinHash, RMinHashDeduplicator, RMinHashLSH

NUM_HASHES = 128  # as in its documentation
HASHES, BANDS = 64, 16  # those of dualtune


def shingles(text: str) -> list[str]:
    plain = " ".join(text.casefold().split())
    return list({plain[i : i + 5] for i in range(max(1, len(plain) - 4))})


def main() -> None:
    texts = [json.loads(line) for line in sys.stdin]
    began = time.process_time()
    found = RMinHashDeduplicator(float(sys.argv[1]), NUM_HASHES, True)
    flags = []
    for i, text in enumerate(texts):
        hashed = RMinHash(NUM_HASHES, 42)
        hashed.update(shingles(text))
        flags.append(not found.add(str(i), hashed))
    seconds = time.process_time() - began
    began = time.process_time()
    index, candidates = RMinHashLSH(float(sys.argv[1]), HASHES, BANDS), []
    for i, text in enumerate(texts):
        hashed = RMinHash(HASHES, 42)
        hashed.update(shingles(text))
        # A copy follows its original, which is the only row that it could repeat.
        candidates.append(i - 1 in index.query(hashed) if i % 2 else False)
        index.insert(i, hashed)
    found = {"candidate_flags": candidates, "candidate_cpu_seconds": time.process_time() - began}
    print(json.dumps({"cpu_seconds": seconds, "flags": flags, **found}))


if __name__ == "__main__":
    main()
