"""Check that the wheel holds every folder of strategies/ and every module of flwr_kd/, and no tests."""

import sys
import zipfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent
names = set(zipfile.ZipFile(sys.argv[1]).namelist())
wanted = {p.relative_to(root).as_posix() for p in (root / "flwr_kd").rglob("*.py")} | {
    f"flwr_kd/{p.relative_to(root).as_posix()}" for p in (root / "strategies").rglob("*.py")
}
pages = {f"flwr_kd/{p.relative_to(root).as_posix()}" for p in (root / "strategies").glob("*/README.md")}
missing = sorted((wanted | pages | {"flwr_kd/py.typed"}) - names)
extra = sorted(n for n in names if n.startswith(("tests/", "strategies/", "apps/")))
if missing or extra:
    sys.exit(f"wheel: missing {missing}, not expected {extra}")
print(f"wheel: {len(wanted)} modules, {len(pages)} pages, nothing missing")
