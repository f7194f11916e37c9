"""The tutorials run as scripts and as notebooks, on tiny models and made-up text; what is committed belongs to them."""

import lzma
import os
import random
import re
import subprocess
import sys

import nbformat
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.tutorial_pages import FOLDER, ROOT, execute, markdown, notebook, search_path, text_of, tidied, with_outputs

SAYS = {  # a line of its end
    "bayesian_classifier": r"\d+ doubts",
    "unsure_tokens": r"epistemic +mean 0\.\d+ nats",
    "trainer_to_server": r"same answers at once and one by one: True",
}
WORDS = ["the", "film", "story", "actor", "march", "squad", "rank", "is", "was", "not", "very", "good", "bad", "dull"]
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}


def save_tokenizer(folder):
    names = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    inner = Tokenizer(models.WordLevel(names, unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", padding_side="left"
    ).save_pretrained(folder)
    return {"vocab_size": len(names), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def sentences(count, length):
    choose = random.Random(0)
    return [" ".join(choose.choices(WORDS, k=length)) for _ in range(count)]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode()))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Models and data in the places where the tutorials look for the real ones."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("stand-ins")
    BertForSequenceClassification(BertConfig(**SIZES, **save_tokenizer(root / "bert"))).save_pretrained(root / "bert")
    LlamaForCausalLM(LlamaConfig(**SIZES, **save_tokenizer(root / "llama"))).save_pretrained(root / "llama")
    for name, count in {"SST-2/train": 420, "SST-2/dev": 40, "CoLA/dev": 20}.items():
        rows = [f"{text}\t{int('good' in text)}" for text in sentences(count, 6)]
        write(root / "data" / "glue" / f"{name}.tsv.xz", "\n".join(["sentence\tlabel", *rows]) + "\n")
    write(root / "data" / "books" / "infantry_drill_regulations.txt.xz", " ".join(sentences(100, 40)))
    return {
        "ENCODER": str(root / "bert"),
        "LANGUAGE_MODEL": str(root / "llama"),
        "BAYESFORMER_DATA": str(root / "data"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


RUN = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, run_name='__main__')"


def test_tutorials_run_as_scripts(environment, tmp_path):
    """By one process, one after the other: most of the time would go into imports."""
    variables = {**os.environ, **environment, "PYTHONPATH": search_path(), "MPLBACKEND": "Agg"}
    command = [sys.executable, "-c", RUN, *(str(FOLDER / f"{name}.py") for name in SAYS)]
    answer = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=300
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    for says in SAYS.values():
        assert re.search(says, answer.stdout)


def test_tutorials_run_as_notebooks_with_a_picture_each(environment, tmp_path):
    """By one kernel, which forgets all names in between."""
    scripts = [(FOLDER / f"{name}.py").read_text() for name in SAYS]
    book = execute(notebook("\n# %%\n%reset -f\n".join(scripts)), tmp_path, environment)
    page, pictures = markdown(book, "tutorials")
    for says in SAYS.values():
        assert re.search(says, page)
    assert [content[:4] for content in pictures.values()] == [b"\x89PNG"] * len(SAYS)
    assert f"](tutorials-{len(SAYS)}.png)" in page


def test_every_tutorial_is_run_and_linked():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SAYS)
    readme = (ROOT / "README.md").read_text()
    for name in SAYS:
        assert f"(docs/tutorials/{name}.md)" in readme


@pytest.mark.parametrize("name", SAYS)
def test_the_committed_notebook_and_page_are_those_of_the_script(name):
    made = notebook((FOLDER / f"{name}.py").read_text())
    text = (FOLDER / f"{name}.ipynb").read_text()
    book = nbformat.reads(text, as_version=4)
    assert [(cell.cell_type, cell.source) for cell in book.cells] == [
        (cell.cell_type, cell.source) for cell in made.cells
    ], f"{name}.py has changed: python -m tests.tutorial_pages docs/tutorials/{name}.py"
    assert text_of(book) == text
    page, pictures = markdown(book, name)
    assert (FOLDER / f"{name}.md").read_text() == page
    assert {path.name: path.read_bytes() for path in FOLDER.glob(f"{name}-*.png")} == pictures
    assert not re.search(r"(?<![\w.])/(?:tmp|home|root|work|Users)/", text)
    assert len(text) < 300_000
    for target in re.findall(r"\]\(([^)#:]+)\)", page):
        assert (FOLDER / target).exists(), target


SCRIPT = '''"""A script."""
# %% [markdown]
# # Title
#
# Text with `code`.

# %%
x = 1  # %% is no mark here


def double(y):
    return 2 * y


# %%
double(x)
'''


def test_cells_of_a_script():
    cells = notebook(SCRIPT).cells
    assert [cell.cell_type for cell in cells] == ["markdown", "code", "code"]
    assert cells[0].source == "# Title\n\nText with `code`."
    assert cells[1].source.startswith("x = 1")
    assert cells[1].source.endswith("return 2 * y")
    nbformat.validate(notebook(SCRIPT))


def test_outputs_stay_where_only_text_has_changed():
    earlier = notebook(SCRIPT)
    earlier.cells[1].outputs = [nbformat.v4.new_output("stream", text="said\n")]
    kept = with_outputs(notebook(SCRIPT.replace("Title", "Another title")), earlier)
    assert kept.cells[0].source.startswith("# Another title")
    assert kept.cells[1].outputs == earlier.cells[1].outputs
    with pytest.raises(ValueError, match="code has changed since the notebook was made"):
        with_outputs(notebook(SCRIPT.replace("x = 1", "x = 2")), earlier)


def test_outputs_are_tidied():
    said = [("stdout", "one\n"), ("stderr", "50%"), ("stdout", "two\n")]
    outputs = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in said]
    picture = nbformat.v4.new_output("display_data", data={"image/png": "iVBORw0KGgo="})
    first, second = tidied([*outputs, picture])
    assert first.text == "one\ntwo\n"
    assert second == picture


def test_outputs_on_a_page():
    book = notebook(SCRIPT)
    book.cells[1].outputs = [nbformat.v4.new_output("stream", text="said\n")]
    book.cells[2].outputs = [nbformat.v4.new_output("display_data", data={"image/png": "iVBORw0KGgo="})]
    page, pictures = markdown(book, "name")
    assert "return 2 * y\n```\n\n```text\nsaid\n```" in page
    assert page.endswith("![Title](name-1.png)\n")
    assert pictures == {"name-1.png": b"\x89PNG\r\n\x1a\n"}
