"""Check that the wheel holds every module of flwr_kd/, all of strategies/ but its pictures, and no tests."""

import sys
import zipfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent
names = set(zipfile.ZipFile(sys.argv[1]).namelist())
wanted = {p.relative_to(root).as_posix() for p in (root / "flwr_kd").rglob("*.py")} | {
    f"flwr_kd/{p.relative_to(root).as_posix()}" for p in (root / "strategies").rglob("*.py")
}
files = {
    f"flwr_kd/{p.relative_to(root).as_posix()}"
    for p in (root / "strategies").glob("*/**/*")
    if p.is_file() and p.suffix not in (".py", ".pyc", ".png")
}
others = {"flwr_kd/py.typed", "flwr_kd/report/page.css", "flwr_kd/report/page.js"}
missing = sorted((wanted | files | others) - names)
extra = sorted(n for n in names if n.startswith(("tests/", "strategies/", "apps/")))
if missing or extra:
    sys.exit(f"wheel: missing {missing}, not expected {extra}")
print(f"wheel: {len(wanted)} modules, {len(files)} other files of methods, nothing missing")
