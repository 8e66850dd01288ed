"""What the source documents call this file is `dualtune check-gpu`, which takes the same options.

python scripts/check_gpu.py [--json …]
"""

import sys

from dualtune.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["check-gpu"]
    main()
