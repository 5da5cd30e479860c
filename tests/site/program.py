"""The script of an interpreter that is to run something else, which stands in its arguments as for ``python``."""

import runpy
import sys
import warnings
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        del sys.argv[:2]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy._run_module_as_main(sys.argv[0])
    elif sys.argv[0] == "-c":
        exec(compile(sys.argv.pop(1), "<string>", "exec"))
    else:
        __file__ = sys.argv[0]
        exec(compile(Path(__file__).read_bytes(), __file__, "exec"))
