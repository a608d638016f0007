"""Program that is interrupted, as by Ctrl-C, at the import of the module named by argument 1."""

INTERRUPTED_IN = """
import sys

interrupted_in = sys.argv[1]

class Interruption:
    def find_spec(self, name, *_):
        if name == interrupted_in:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interruption())
"""
