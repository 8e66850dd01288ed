"""What the source documents call this file is `dualtune check-config`; their option --config is its argument.

python scripts/validate_training_config.py --config configs/lora_chat.yaml [--json …]
"""

import sys

from dualtune.cli.main import main

if __name__ == "__main__":
    args = (arg.removeprefix("--config=") for arg in sys.argv[1:] if arg != "--config")
    sys.argv[1:] = ["check-config", *args]
    main()
