"""The command lines of README.md and docs/ run, in small sizes; docs/program.md names the options that the program has;
numbers in docs/graph.md are those that the program prints."""

import functools
import json
import os
import pathlib
import re
import shlex
import subprocess

import pytest
from conftest import required

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
OPST = os.environ.get("OPST_PROGRAM", "")

pytestmark = pytest.mark.skipif(not OPST, reason="the program is not built (OPST_PROGRAM)")


def opst(*words, **options):
    return subprocess.run([OPST, *words], text=True, capture_output=True, timeout=300, stdin=subprocess.DEVNULL, **options)


def model_or_skip():
    path = os.environ.get("OPST_MODEL", "")
    if not pathlib.Path(path).is_file() and not required("model"):
        pytest.skip("the model file is not there (OPST_MODEL)")
    return path


# ---- command lines ---------------------------------------------------------------------------------------------------


def commands():
    """Lines of code that begin with opst, and `opst ...` within a sentence where it has options."""
    found = []
    for page, text in PAGES.items():
        for line in re.findall(r"^    (opst .*)$", text, re.M):
            found.append((page, re.split(r"   +|  # ", line)[0]))
        for code in re.findall(r"`(opst [^`]*)`", text):
            if " -" in code:
                found.append((page, code))
    # What an ellipsis leaves to the reader, or a name in capitals, is no command line.
    return sorted({(page, code) for page, code in found if not re.search(r"\.\.\.|\bSUBCOMMAND\b|, opst| \.", code)})


# What stands for a file or a size of the reader's own.
STAND_INS = {"--dtype T": "--dtype f32", "--threads T": "--threads 1", "--heads H": "--heads 1", "--head-dim D": "--head-dim 64",
             "--m M": "--m 4", "[--causal]": "--causal", "--model F ": "--model MODEL ", "F.gguf": "MODEL", "model.gguf": "MODEL",
             "book.txt": "TEXT", "t.json": "TRACE"}
# A bench with the sizes of the page takes minutes; its command line is what is tried here.
SMALL = {"--seq": "64", "--n": "64", "--k": "64", "--m": "4", "--prompt-tokens": "8", "--context": "32", "--varlen": "64,32",
         "--max-seq": "64", "--budget": "5"}


def of_model(words):
    return words[0] in ("generate", "chat", "perplexity", "tokenize") or words[1:2] == ["model"]


def runnable(code, model, folder):
    for written, meant in STAND_INS.items():
        code = code.replace(written, meant)
    text = folder / "text.txt"
    text.write_text("The cat sat on the mat, and the dog lay beside it.\n", encoding="utf-8")
    words = [{"MODEL": model, "TEXT": str(text), "TRACE": str(folder / "t.json")}.get(w, w) for w in shlex.split(code)[1:]]
    if words[0] == "bench":
        words = [SMALL.get(before, word) for before, word in zip([""] + words, words)]
    if words[:2] == ["bench", "model"]:
        words += [word for option in ("--prompt-tokens", "--context") if option not in words for word in (option, SMALL[option])]
    if words[:2] == ["bench", "tables"] and "--max-seq" not in words:
        words += ["--max-seq", SMALL["--max-seq"]]
    if of_model(words) and not {"-m", "--model"} & set(words):  # said on the page around it
        words += ["-m", model]
    if words[0] == "perplexity" and "-f" not in words:
        words += ["-f", str(text)]
    if words[0] in ("generate", "chat") and "-n" not in words:
        words += ["--max-tokens", "4"]
    return words


def test_there_are_commands():
    assert len(commands()) >= 15


@pytest.mark.parametrize("page, code", commands())
def test_command(page, code, tmp_path):
    words = runnable(code, model_or_skip() if of_model(code.split()[1:]) else "", tmp_path)
    result = opst(*words)
    assert result.returncode == 0, f"{page}: opst {shlex.join(words)}: {result.stderr}"
    assert result.stdout or words[0] == "chat"  # without messages there is no answer
    if "--trace" in words:
        assert json.loads((tmp_path / "t.json").read_text())


# ---- options ---------------------------------------------------------------------------------------------------------


@functools.cache
def options_of(*subcommand):
    result = opst(*subcommand, "--help")
    assert result.returncode == 0
    return set(re.findall(r"^ +(?:-\w, *)?(--[a-z][a-z0-9-]*)", result.stdout, re.M)) - {"--help"}


def options_on_page(section):
    body = re.search(rf"^## {re.escape(section)}$(.*?)(?=^## |\Z)", PAGES["program.md"], re.M | re.S)
    assert body, f"docs/program.md has no section {section}"
    # In tables the first column is the option, behind it may stand words about others.
    text = "\n".join(line.split(" | ")[0] if line.startswith("|") else line for line in body[1].splitlines())
    text = re.sub(r"^    .*$", "", text, flags=re.M)
    return set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]*)", text))


@pytest.mark.parametrize("section, subcommands", [
    ("opst generate", [("generate",)]),
    ("opst chat", [("chat",)]),
    ("opst perplexity", [("perplexity",)]),
    ("opst tokenize", [("tokenize",)]),
    ("opst bench, check, plan attention", [("bench", "attention"), ("check", "attention"), ("plan", "attention")]),
    ("opst bench tables", [("bench", "tables")]),
    ("opst bench, plan model", [("bench", "model"), ("plan", "model")]),
])
def test_options_of_the_program_are_those_of_the_page(section, subcommands):
    has = set().union(*(options_of(*words) for words in subcommands))
    everywhere = {"--threads", "--json", "--model"}  # said once for all
    written = options_on_page(section)
    assert written - has == set(), "the page names options that the program does not have"
    assert has - written - everywhere == set(), "the program has options that the page does not name"


def test_a_wrong_option_is_noticed():
    assert "--no-such-option" not in options_of("generate") and "--prompt" in options_of("generate")
    assert opst("bench", "attention", "--no-such-option").returncode == 2


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_of_the_graph():
    result = opst("plan", "model", "-m", model_or_skip(), "--tokens", "512", "--all", "--json")
    graphs = json.loads(result.stdout)["graphs"]
    layers = next(graph for graph in graphs if graph["name"] == "layers")
    text = PAGES["graph.md"]
    said = re.search(r"([\d.]+) MB for steps of 512 rows, where tensors of their own would take (\d+) MB", text)
    assert float(said[1]) == round(layers["workspace_bytes"] / 1e6, 1)
    assert int(said[2]) == round(layers["sum_bytes"] / 1e6)
    nodes = sum(len(graph["nodes"]) for graph in graphs)
    assert {int(n) for n in re.findall(r"(\d+) nodes\b", text) if int(n) > 100} == {nodes}
