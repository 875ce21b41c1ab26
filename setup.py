"""Package list for setuptools; everything else is in pyproject.toml.

``strategies/`` at the top is published as ``flwr_kd.strategies``. setuptools' automatic discovery does not
follow ``package-dir`` mappings, so the folders are found here: a new method needs no entry anywhere. A method's
page and its experiments are in the wheel, its pictures are not.
"""

from setuptools import find_namespace_packages, find_packages, setup

setup(
    package_dir={"flwr_kd": "flwr_kd", "flwr_kd.strategies": "strategies"},
    packages=[
        *find_packages(include=["flwr_kd", "flwr_kd.*"]),
        "flwr_kd.strategies",
        *(
            f"flwr_kd.strategies.{name}"
            for name in find_namespace_packages("strategies", exclude=["*__pycache__"])
        ),
    ],
    package_data={
        "flwr_kd": ["py.typed"],
        "flwr_kd.app_files": ["LICENSE", "page.md"],
        "flwr_kd.report": ["page.css", "page.js"],
        "flwr_kd.strategies": ["*/*.md", "*/*.toml", "*/experiments/*"],
    },
)
