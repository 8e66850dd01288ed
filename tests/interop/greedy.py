"""Greedy answers by llama-cpp-python, in its environment: token ids as JSON.

python greedy.py '{"model": GGUF, "prompts": [[1, 2], …], "num_tokens": 20}'
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "dualtune" / "use" / "export"))
from in_llama_cpp import opened


def main():
    job = json.loads(sys.argv[1])
    llama, found = opened(job), []
    for prompt in job["prompts"]:
        llama.reset()
        llama.eval(prompt)
        answer = []
        for _ in range(job["num_tokens"]):
            answer.append(int(llama.scores[llama.n_tokens - 1].argmax()))
            llama.eval(answer[-1:])
        found.append(answer)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
