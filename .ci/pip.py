"""Run pip, without its warnings of configured places that lack a package: `pip.py install NAME`.

A mirror or a folder of wheels need not hold every package; whatever else pip says is passed on.
"""

import re
import signal
import subprocess
import sys

LACKS = re.compile(r"WARNING: Location '.*' is ignored: it is neither a file nor a directory")

if __name__ == "__main__":
    command = [sys.executable, "-m", "pip", *sys.argv[1:]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as pip:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches pip, too, which ends by it
        for line in pip.stderr or ():
            if not LACKS.match(line):
                print(line, end="", file=sys.stderr, flush=True)
    sys.exit(pip.returncode)
