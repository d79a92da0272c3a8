import sys

try:
    from quire.cli import main

    code = main()
except KeyboardInterrupt:  # while Python's own modules were read, too
    code = 130
sys.exit(code)
