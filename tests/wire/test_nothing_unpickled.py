"""No byte that comes from outside becomes code: what could do that is not used, anywhere.

Messages are MessagePack into typed structs (`contracts.wire`), settings and metadata JSON or plain
binary formats. So pickle and its kin, and `eval`, have no reason to be in what is shipped.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
MODULES |= {"jsonpickle", "copyreg"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    *("pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("torch.load", "numpy.load", "np.load", "deserialize_descs"),
}
"""`numpy.load` unpickles if it is told to; nothing here needs it."""


def sources() -> list[Path]:
    found = [path for room in ("libs", "services") for path in ROOT.glob(f"{room}/*/src/**/*.py")]
    assert len(found) > 300
    return found


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, n.name) for n in names if root(n.name) in MODULES)
            case ast.ImportFrom(module=str(module)) if root(module) in MODULES:
                yield node.lineno, module
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield node.lineno, name
            case ast.Call(func=ast.Attribute() as func) if dotted(func) in METHODS:
                yield node.lineno, dotted(func)
            case ast.keyword(arg="allow_pickle"):
                yield node.value.lineno, "allow_pickle"


def root(module: str) -> str:
    return module.partition(".")[0]


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Attribute(value=value, attr=attr):
            before = dotted(value)
            return f"{before}.{attr}" if before else attr
        case ast.Name(id=name):
            return name
    return ""


def test_nothing_shipped_makes_code_of_data() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sources()
        for line, what in dangers(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "import marshal as m", "from pickle import loads", "from dill import *"),
        *("eval('1')", "exec(code)", "yaml.load(text)", "torch.load(path)", "__import__(name)"),
        *("np.load(f, allow_pickle=True)", "def f():\n    import cloudpickle.x"),
    ],
)
def test_the_test_sees_it(code: str) -> None:
    assert list(dangers(ast.parse(code)))


@pytest.mark.parametrize("code", ["re.compile('x')", "yaml.safe_load(t)", "json.loads(t)"])
def test_and_nothing_else(code: str) -> None:
    assert not list(dangers(ast.parse(code)))
