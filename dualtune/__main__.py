"""`python -m dualtune`: the command line, where the console script is not at hand."""

from dualtune.cli.main import main

if __name__ == "__main__":
    main()
