"""Check that a wheel holds flwr_kd/ and strategies/ but its pictures, as they are in the checkout.

The wheel is built from the sdist, so that the sdist is complete as well.
"""

import re
import sys
import zipfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent
path = Path(sys.argv[1])
wheel = zipfile.ZipFile(path)
names = set(wheel.namelist())
modules = {p.relative_to(root).as_posix(): p for p in (root / "flwr_kd").rglob("*.py")} | {
    f"flwr_kd/{p.relative_to(root).as_posix()}": p for p in (root / "strategies").rglob("*.py")
}
files = {
    f"flwr_kd/{p.relative_to(root).as_posix()}": p
    for p in (root / "strategies").glob("*/**/*")
    if p.is_file() and p.suffix not in (".py", ".pyc", ".png")
}
data = ("py.typed", "report/page.css", "report/page.js", "app_files/LICENSE", "app_files/page.md")
others = {f"flwr_kd/{name}": root / "flwr_kd" / name for name in data}
wanted = modules | files | others
missing = sorted(set(wanted) - names)
changed = sorted(name for name in set(wanted) & names if wheel.read(name) != wanted[name].read_bytes())
extra = sorted(name for name in names - set(wanted) if ".dist-info/" not in name)
(version,) = re.findall(
    r'^__version__ = "(.+)"$', (root / "flwr_kd/__init__.py").read_text("utf-8"), flags=re.M
)
if missing or changed or extra:
    sys.exit(f"wheel: missing {missing}, not as in the checkout {changed}, not expected {extra}")
if path.name.split("-")[1] != version:
    sys.exit(f"wheel: {path.name} is not of version {version}, which flwr_kd/__init__.py says")
print(f"wheel: {version}, {len(modules)} modules, {len(files)} other files of methods, as in the checkout")
