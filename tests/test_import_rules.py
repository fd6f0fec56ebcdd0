"""The dependency rules of the package, checked on its source: who may import what, and who may touch the device.

Layers, from the bottom: cache/ (host data structures) and pallas/ (arrays in, arrays out) know nothing of the rest;
model/ sees pages as integer arrays; request, config and scheduler never touch jax; runner alone talks to the device.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "jradix"
ROOT = Path(__file__).parents[1]

STDLIB_AND_NUMPY = sys.stdlib_module_names | {"numpy"}
USES_JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
HTTP = {"aiohttp", "fastapi", "http", "httpx", "requests", "starlette", "uvicorn"}
TEXT = {"jinja2", "tokenizers", "transformers"}
DEVICE_CALLS = {"jit", "pjit", "pmap", "device_put", "device_get", "block_until_ready", "copy_to_host_async"}
PLATFORM_QUERIES = {"default_backend", "device_kind", "platform", "platform_dependent"}
PLATFORMS = {"cpu", "cuda", "gpu", "rocm", "tpu"}
MUTABLE_CALLS = {"Counter", "OrderedDict", "bytearray", "defaultdict", "deque", "dict", "list", "set"}
GLOBAL_CONTEXT_CALLS = {"ContextVar", "local"}
MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert"),
    *("pop", "popitem", "popleft", "remove", "setdefault", "update"),
}


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its syntax tree, and the dotted names it imports anywhere in it."""

    name: str
    path: str
    tree: ast.Module
    imports: frozenset[str]

    @classmethod
    def parse(cls, path: str, source: str, known: set[str]) -> "Module":
        tree = ast.parse(source)
        name = module_name(path)
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        return cls(name, path, tree, frozenset(imported_names(tree, package, known)))


def under(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def top(name: str) -> str:
    return name.partition(".")[0]


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(tree: ast.Module, package: str, known: set[str]) -> Iterator[str]:
    """Yields absolute dotted names. `from a import b` means a.b where that is a module of ours, else a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in known else base


@dataclass(frozen=True)
class Ban:
    """Modules for which `applies` holds must not import a name for which `banned` holds."""

    rule: str
    applies: Callable[[str], bool]
    banned: Callable[[str], bool]


def is_pure_cache(name: str) -> bool:
    return under(name, "jradix.cache") and name != "jradix.cache.pool"


def is_host_only(name: str) -> bool:
    """request, config, the scheduler, and the policies it keeps in modules of their own."""
    return re.fullmatch(r"jradix\.(request|config|\w*schedul\w*|\w*polic\w*)", name) is not None


BANS = [
    Ban(
        "1: cache/, but for pool.py, is standard library and numpy",
        is_pure_cache,
        lambda name: not (top(name) in STDLIB_AND_NUMPY or is_pure_cache(name)),
    ),
    Ban(
        "2: the scheduler sees the cache through prefix_cache alone",
        is_host_only,
        lambda name: under(name, "jradix.cache") and name != "jradix.cache.prefix_cache",
    ),
    Ban(
        "3: pallas/ takes arrays and returns arrays",
        lambda name: under(name, "jradix.pallas"),
        lambda name: under(name, PACKAGE) and not under(name, "jradix.pallas"),
    ),
    Ban(
        "4: pages reach model/ as integer arrays",
        lambda name: under(name, "jradix.model"),
        lambda name: under(name, "jradix.cache", "jradix.scheduler", "jradix.request"),
    ),
    Ban("5: only server/ knows HTTP", lambda name: not under(name, "jradix.server"), lambda name: top(name) in HTTP),
    Ban(
        "5: only server/, processes.py and rendezvous.py open sockets",
        lambda name: not under(name, "jradix.server", "jradix.processes", "jradix.rendezvous"),
        lambda name: top(name) == "socket",
    ),
    Ban("5: only tokenizers know text", lambda name: not name.endswith("tokenizer"), lambda name: top(name) in TEXT),
]


def layer_violations(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    for ban in BANS:
        if ban.applies(module.name):
            yield from (f"{ban.rule}, but this imports {name}" for name in module.imports if ban.banned(name))
    if is_host_only(module.name):
        for importer, name in reachable_imports(module, modules):
            if top(name) in USES_JAX:
                yield f"2: request, config and scheduler never load jax, but {importer} imports {name}"


def reachable_imports(module: Module, modules: dict[str, Module]) -> Iterator[tuple[str, str]]:
    """Yields (importer, imported) for `module` and for every module of ours that importing it loads."""
    seen, queue = {module.name}, [module]
    while queue:
        current = queue.pop()
        yield from ((current.name, name) for name in current.imports)
        for name in (current.imports & modules.keys()) - seen:
            seen.add(name)
            queue.append(modules[name])


def device_violations(module: Module) -> Iterator[str]:
    allowed: set[str] = set()
    if module.name == "jradix.runner":
        allowed = DEVICE_CALLS
    elif module.name in {"jradix.jitted", "jradix.features"}:
        allowed = {"jit"}  # what the runner compiles
    elif module.name == "jradix.mesh" or module.name.startswith("jradix.model.weights"):
        allowed = {"device_put", "block_until_ready"}  # weights go to their devices shard by shard
    for line, used in used_names(module.tree):
        if used in DEVICE_CALLS - allowed:
            yield f"5: only runner jits, transfers, blocks or reads back, but line {line} uses {used}"


def platform_violations(module: Module) -> Iterator[str]:
    if module.name in {"jradix.aot", "jradix.mesh"} | {f"jradix.pallas.{name}" for name in ("ops", "layout", "rows")}:
        return
    for line, used in used_names(module.tree):
        if used in PLATFORM_QUERIES:
            yield f"6: only pallas/, mesh.py and aot.py ask for the platform, but line {line} uses {used}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Compare):
            constants = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            if found := constants & PLATFORMS:
                yield f"6: only pallas/, mesh.py and aot.py know platforms, but line {node.lineno} tests {found}"


def used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Attributes (but those of sys, as in sys.platform) and names imported from elsewhere, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "sys"):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)


def state_violations(module: Module) -> Iterator[str]:
    constants: set[str] = set()
    for node in module.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        if called_name(node.value) in GLOBAL_CONTEXT_CALLS:
            yield f"7: no global context, but line {node.lineno} makes one"
        if not is_mutable(node.value):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            final = isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation)
            name = ast.unparse(target)
            if name == "__all__" or name.isupper() or final:
                constants.add(name)
            else:  # not marked as a constant
                yield f"7: no mutable module state, but line {node.lineno} makes {name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield f"7: no mutable module state, but line {node.lineno} declares global {', '.join(node.names)}"
        elif (name := mutated_name(node)) in constants:
            yield f"7: no mutable module state, but line {getattr(node, 'lineno', 0)} changes {name}"


def is_mutable(value: ast.expr) -> bool:
    literals = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    return isinstance(value, literals) or called_name(value) in MUTABLE_CALLS


def called_name(value: ast.expr) -> str:
    return ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""


def mutated_name(node: ast.AST) -> str | None:
    """The x of x[...] = ..., del x[...] and x.append(...)."""
    match node:
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if attr in MUTATORS:
            return name
    return None


def cycle_violations(modules: dict[str, Module]) -> Iterator[str]:
    """A cycle of explicit imports, also of those inside functions, one report a cycle.

    That importing a.b also runs a/__init__.py is no edge: every package would be a cycle."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> Iterator[str]:
        if name in trail:
            yield "7: no import cycles, but " + " -> ".join([*trail[trail.index(name) :], name])
        elif name not in done:
            for imported in sorted(modules[name].imports & modules.keys()):
                yield from visit(imported, [*trail, name])
            done.add(name)

    for name in sorted(modules):
        yield from visit(name, [])


def violations(sources: dict[str, str]) -> list[str]:
    """What breaks a rule in `sources` (path from the root of the repository -> text), as "path: rule: what"."""
    known = {module_name(path) for path in sources}
    modules = {module.name: module for module in (Module.parse(p, s, known) for p, s in sources.items())}
    found = [
        f"{module.path}: {violation}"
        for module in modules.values()
        for violation in [
            *layer_violations(module, modules),
            *device_violations(module),
            *platform_violations(module),
            *state_violations(module),
        ]
    ]
    return sorted(found) + list(cycle_violations(modules))


def test_the_package_keeps_every_rule() -> None:
    sources = {str(p.relative_to(ROOT)): p.read_text("utf-8") for p in sorted((ROOT / PACKAGE).rglob("*.py"))}
    assert sources
    assert violations(sources) == []


BROKEN = [
    ("1", {"jradix/cache/radix.py": "import jax.numpy as jnp"}),
    ("1", {"jradix/cache/radix.py": "def f():\n    from flax import nnx"}),
    ("1", {"jradix/cache/radix.py": "from jradix.request import Request", "jradix/request.py": ""}),
    ("1", {"jradix/cache/radix.py": "from ..config import EngineConfig", "jradix/config.py": ""}),
    ("1", {"jradix/cache/__init__.py": "from .pool import Pool", "jradix/cache/pool.py": "import jax"}),
    ("2", {"jradix/scheduler.py": "import jax"}),
    ("2", {"jradix/schedule_policy.py": "from jax import numpy"}),
    ("2", {"jradix/config.py": "import jradix.mesh", "jradix/mesh.py": "import jax"}),
    ("2", {"jradix/scheduler.py": "from jradix.cache import radix", "jradix/cache/radix.py": ""}),
    ("3", {"jradix/pallas/ops.py": "from jradix.config import EngineConfig", "jradix/config.py": ""}),
    ("4", {"jradix/model/llama.py": "from jradix.cache.pool import Pool", "jradix/cache/pool.py": ""}),
    ("4", {"jradix/model/llama.py": "from .. import request", "jradix/request.py": ""}),
    ("5", {"jradix/engine.py": "from fastapi import FastAPI"}),
    ("5", {"jradix/engine.py": "import transformers"}),
    ("5", {"jradix/engine.py": "import jax\nf = jax.jit(abs)"}),
    ("5", {"jradix/sampling.py": "import functools, jax\n@functools.partial(jax.jit, static_argnums=0)\ndef f(): ..."}),
    ("5", {"jradix/model/llama.py": "from flax import nnx\n@nnx.jit\ndef f(): ..."}),
    ("5", {"jradix/engine.py": "from jax import device_put"}),
    ("5", {"jradix/engine.py": "def f(x):\n    return x.block_until_ready()"}),
    ("5", {"jradix/engine.py": "def f(x):\n    x.copy_to_host_async()"}),
    ("5", {"jradix/model/weights.py": "import jax\ndef f(x):\n    return jax.device_get(x)"}),
    ("6", {"jradix/model/layers.py": "import jax\nSCAN = jax.default_backend() == 'axon'"}),
    ("6", {"jradix/runner.py": "def f(device):\n    return device.platform"}),
    ("6", {"jradix/engine.py": "def f(kind):\n    return kind in ('tpu', 'gpu')"}),
    ("7", {"jradix/engine.py": "engines = []"}),
    ("7", {"jradix/engine.py": "engines: dict[str, int] = dict()"}),
    ("7", {"jradix/engine.py": "import collections\nengines = collections.defaultdict(list)"}),
    ("7", {"jradix/engine.py": "FAMILIES = {}\ndef register(name, f):\n    FAMILIES[name] = f"}),
    ("7", {"jradix/engine.py": "SEEN = set()\ndef see(name):\n    SEEN.add(name)"}),
    ("7", {"jradix/engine.py": "count = 0\ndef f():\n    global count\n    count += 1"}),
    ("7", {"jradix/engine.py": "from contextvars import ContextVar\nCURRENT = ContextVar('current')"}),
    ("7", {"jradix/a.py": "import jradix.b", "jradix/b.py": "def f():\n    from jradix import a"}),
]


@pytest.mark.parametrize(("rule", "sources"), BROKEN, ids=[f"rule{rule}-{i}" for i, (rule, _) in enumerate(BROKEN)])
def test_a_broken_rule_is_found_and_named(rule: str, sources: dict[str, str]) -> None:
    found = violations(sources)
    assert found
    assert {re.sub(r"^jradix/\S+: ", "", line)[0] for line in found} == {rule}, found


def test_code_within_the_rules_passes() -> None:
    assert (
        violations(
            {
                "jradix/__init__.py": "from jradix.engine import Engine\n__all__ = ['Engine']",
                "jradix/cache/radix.py": "import heapq\nimport numpy as np\nfrom .pages import PageAllocator",
                "jradix/cache/pages.py": "from dataclasses import dataclass\nNULL_PAGE = 0",
                "jradix/cache/pool.py": "import jax\nfrom jradix.cache.pages import NULL_PAGE",
                "jradix/cache/prefix_cache.py": "from jradix.cache import pages, radix",
                "jradix/request.py": "import sys\nBIG = sys.platform",
                "jradix/scheduler.py": "from .cache.prefix_cache import PrefixCache\nfrom .request import Request",
                "jradix/pallas/ops.py": "import jax\ndef pick():\n    return jax.default_backend() == 'tpu'",
                "jradix/model/weights_gguf.py": "import gguf, jax\ndef f(x):\n    return jax.device_put(x)",
                "jradix/runner.py": "import jax\nfrom jradix.pallas import ops\n@jax.jit\ndef step(x):\n    return x",
                "jradix/tokenizer.py": "from tokenizers import Tokenizer",
                "jradix/server/app.py": "from fastapi import FastAPI\nfrom jradix.engine import Engine",
                "jradix/engine.py": "from typing import Final\nfrom jradix import runner\nnames: Final = [1]",
                "jradix/batch.py": "PAD = {}\ndef f():\n    out = {}\n    out['a'] = PAD['a']\n    return out",
            }
        )
        == []
    )
