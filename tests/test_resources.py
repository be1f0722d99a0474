"""The CUDA sources and profile tables travel with wheels, sdists and editable installs."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tessera_cupy
from tessera_cupy import _resources
from tessera_cupy.errors import TesseraError

ROOT = Path(__file__).resolve().parents[1]

RESOLVE = """
import tessera_cupy
from tessera_cupy._resources import kernels_dir, plans_dir
print(tessera_cupy.__file__, kernels_dir(), plans_dir(), sep="\\n")
print(len((kernels_dir() / "attend_mma.cu").read_bytes()))
"""


def run(*arguments: str | Path, cwd: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def data_files() -> dict[str, bytes]:
    """Every file of the checkout that an install must have, by its path there."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for folder in ("kernels_cu", "plans")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist of this checkout, and the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


def test_sdist_carries_both_folders(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        top = archive.name.removesuffix(".tar.gz")
        for name, content in data_files().items():
            member = tar.extractfile(f"{top}/{name}")
            assert member is not None
            assert member.read() == content


def test_wheel_carries_both_folders_and_nothing_beside_the_package(built: Path) -> None:
    (archive,) = built.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        names = wheel.namelist()
        for name, content in data_files().items():
            assert wheel.read(f"tessera_cupy/_data/{name}") == content
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"tessera_cupy"}
    assert "tessera_cupy/py.typed" in names
    assert archive.name.startswith(f"tessera_cupy-{tessera_cupy.__version__}-py3")


def test_installed_wheel_reads_its_own_copy(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    (site / "plans").mkdir(parents=True)
    (site / "plans" / "unrelated.yaml").write_text("of another package")
    install = ("-m", "pip", "install", "--no-deps", "--no-index", "--target")
    run(*install, site, wheel, cwd=tmp_path)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{RESOLVE}"
    package, kernels, plans, size = run("-I", "-c", code, cwd=tmp_path)
    assert Path(package) == site / "tessera_cupy" / "__init__.py"
    assert Path(kernels) == site / "tessera_cupy" / "_data" / "kernels_cu"
    assert Path(plans) == site / "tessera_cupy" / "_data" / "plans"
    assert int(size) == (ROOT / "kernels_cu" / "attend_mma.cu").stat().st_size


def test_editable_install_reads_the_checkout(tmp_path: Path) -> None:
    code = f"from hatchling.build import build_editable as b; print(b({str(tmp_path)!r}))"
    run("-c", code, cwd=ROOT)
    (archive,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(archive) as wheel:
        # A copy here would go stale beside the checkout, and hide its removal.
        assert not [name for name in wheel.namelist() if name.startswith("tessera_cupy/")]
        wheel.extractall(site)
    code = f"import site; site.addsitedir({str(site)!r})\n{RESOLVE}"
    package, kernels, plans, _ = run("-I", "-c", code, cwd=tmp_path)
    assert Path(package) == ROOT / "tessera_cupy" / "__init__.py"
    assert Path(kernels) == ROOT / "kernels_cu"
    assert Path(plans) == ROOT / "plans"


def test_packaged_copy_comes_before_the_sibling(tmp_path: Path) -> None:
    package = tmp_path / "package"
    for folder in (package / "_data" / "plans", tmp_path / "plans"):
        folder.mkdir(parents=True)
        (folder / "sm00.yaml").touch()
    assert _resources._find(package, "plans", "*.yaml") == package / "_data" / "plans"


def test_sibling_serves_when_the_package_has_no_copy(tmp_path: Path) -> None:
    (tmp_path / "package" / "_data" / "plans").mkdir(parents=True)
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "sm00.yaml").touch()
    assert _resources._find(tmp_path / "package", "plans", "*.yaml") == tmp_path / "plans"


def test_error_names_both_places(tmp_path: Path) -> None:
    package = tmp_path / "package"
    with pytest.raises(TesseraError, match="pip install -e") as caught:
        _resources._find(package, "kernels_cu", "attend_mma.cu")
    assert str(package / "_data" / "kernels_cu") in str(caught.value)
    assert str(tmp_path / "kernels_cu") in str(caught.value)
