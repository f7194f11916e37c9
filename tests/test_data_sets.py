"""Data sets: fetched from a local server, read by one reader, and refused when they are not what they should be."""

import gzip
import hashlib
import http.server
import io
import json
import lzma
import pickle
import tarfile
import threading
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from bayesformer import cli
from bayesformer.core.errors import DamagedFileError
from bayesformer.datasets import converting, fetching, inventory, mnist, planetoid, sources, treebank
from bayesformer.datasets.contents import read_content, unpacked
from bayesformer.datasets.places import locate
from bayesformer.datasets.sources import DataFile, DataSource, Download


def sha(content):
    return hashlib.sha256(content).hexdigest()


def idx(array):
    magic = 2051 if array.ndim == 3 else 2049
    return np.array([magic, *array.shape], ">i4").tobytes() + array.astype(np.uint8).tobytes()


def images(name="mnist", train=12, test=5, url="http://nowhere.invalid"):
    """A small set of images, by the name of a real one: its content by path, and its source."""
    source = np.random.default_rng(0)
    content = {}
    for part, count in (("train", train), ("t10k", test)):
        content[f"{name}/{part}-images-idx3-ubyte.gz"] = idx(source.integers(0, 256, (count, 28, 28)))
        content[f"{name}/{part}-labels-idx1-ubyte.gz"] = idx(np.arange(count) % 10)
    files = tuple(DataFile(path, sha(held), (Download(f"{url}/{path}"),)) for path, held in content.items())
    return content, DataSource(name, "images", "none", files)


def put(folder, content):
    for path, held in content.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(gzip.compress(held) if path.endswith(".gz") else held)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A data folder and a cache of the test's own."""
    monkeypatch.setenv("BAYESFORMER_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("BAYESFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path


@pytest.fixture
def server(tmp_path):
    """A web server on this machine; yields its address and the folder it serves."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    folder = tmp_path / "served"
    folder.mkdir()
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_address[1]}", folder
    running.shutdown()
    running.server_close()
    thread.join()


def test_images_are_split_and_scaled_by_the_training_part(places):
    content, source = images()
    put(places / "data", content)
    data = mnist.load(validation=4, source=source)
    assert (len(data.train), len(data.validation), len(data.test)) == (8, 4, 5)
    assert data.train.inputs.shape == (8, 1, 28, 28)
    torch.testing.assert_close(data.train.inputs.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.train.inputs.std(), torch.tensor(1.0), atol=1e-5, rtol=0)
    raw = content["mnist/t10k-images-idx3-ubyte.gz"][16:]
    back = 255 * (data.test.inputs * data.std + data.mean)
    assert torch.equal(back.round().flatten().to(torch.uint8), torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    answers = torch.cat([data.train.targets, data.validation.targets]).sort().values
    assert answers.tolist() == sorted(i % 10 for i in range(12))  # every image is in one part
    again = mnist.load(validation=4, source=source)
    assert torch.equal(data.train.inputs, again.train.inputs)
    with pytest.raises(ValueError, match=r"validation must be in 1..11; got 12"):
        mnist.load(validation=12, source=source)


def test_a_folder_that_is_empty_half_copied_or_of_another_version_is_named(places, monkeypatch):
    content, source = images()
    load = partial(mnist.load, validation=4, source=source)
    with pytest.raises(FileNotFoundError, match=r"holds mnist/train-images.*it does not have them.*data get mnist"):
        load()
    some = dict(list(content.items())[:3])
    put(places / "data", some)
    with pytest.raises(FileNotFoundError, match=r"t10k-labels-idx1-ubyte.gz does not exist.*copied in part"):
        load()
    put(places / "data", content)
    load()
    path = places / "data" / "mnist" / "t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedFileError, match=r"t10k-images.*cannot be read: EOFError.*truncated or altered"):
        load()
    other = bytearray(gzip.decompress(whole))
    other[-1] ^= 1
    path.write_bytes(gzip.compress(bytes(other)))
    with pytest.raises(DamagedFileError, match=r"must have the content of sha256 .*another version"):
        load()
    path.write_bytes(gzip.compress(gzip.decompress(whole), 1))  # packed in another way: the same data
    load()
    monkeypatch.setenv("BAYESFORMER_DATA", str(places / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"BAYESFORMER_DATA must name a folder; .*nowhere does not exist"):
        load()


def test_the_cache_is_read_where_the_folder_has_no_such_set(places):
    content, source = images()
    put(places / "cache" / "data", content)
    assert locate("mnist/t10k-labels-idx1-ubyte.gz", "images").is_relative_to(places / "cache")
    mnist.load(validation=4, source=source)
    put(places / "data", dict(list(content.items())[:1]))  # a folder that has a part of the set is not passed over
    with pytest.raises(FileNotFoundError, match="copied in part"):
        mnist.load(validation=4, source=source)


def test_a_set_is_fetched_once_and_read_like_a_folder(places, server, monkeypatch):
    address, folder = server
    content, source = images(url=address)
    put(folder, content)
    said = []
    paths = fetching.fetch(source, places / "cache" / "data", said.append)
    assert len(paths) == 4
    assert all(text.startswith("fetching http") for text in said)
    read = mnist.load(validation=4, source=source)
    put(places / "data", content)
    assert torch.equal(read.train.inputs, mnist.load(validation=4, source=source).train.inputs)
    said.clear()
    fetching.fetch(source, places / "cache" / "data", said.append)
    assert all(text.endswith("is there") for text in said)
    monkeypatch.setitem(sources.SOURCES, "mnist", source)
    assert cli.main(["data", "get", "mnist"]) == 0


@pytest.mark.parametrize("damage", ["cut", "altered", "page"])
def test_a_broken_download_is_never_used(places, server, damage, capsys, monkeypatch):
    address, folder = server
    content, source = images(url=address)
    put(folder, content)
    path = folder / "mnist" / "train-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    other = {"cut": whole[:-9], "altered": gzip.compress(b"another content"), "page": b"<html>busy</html>"}[damage]
    path.write_bytes(other)
    target = places / "cache" / "data"
    with pytest.raises(DamagedFileError, match=r"train-labels-idx1-ubyte.gz .*nothing of it was kept"):
        fetching.fetch(source, target)
    assert not (target / "mnist" / "train-labels-idx1-ubyte.gz").exists()
    monkeypatch.setitem(sources.SOURCES, "mnist", source)
    assert cli.main(["data", "get", "mnist"]) == 2  # in words, not as a traceback
    assert "nothing of it was kept" in capsys.readouterr().err
    path.write_bytes(whole)
    assert fetching.fetch(source, target)[-1].exists()


def test_a_published_hash_is_checked_before_anything_is_made_of_a_download(places, server):
    address, folder = server
    (folder / "a").write_bytes(b"content")

    def make(_):
        raise AssertionError("made of a broken download")

    download = Download(f"{address}/a", "md5:" + hashlib.md5(b"other").hexdigest())
    source = DataSource("set", "", "", (DataFile("set/a.xz", sha(b"content"), (download,), make),))
    with pytest.raises(DamagedFileError, match="is broken, nothing of it was kept"):
        fetching.fetch(source, places / "cache")
    missing = DataSource("set", "", "", (DataFile("set/b", sha(b""), (Download(f"{address}/b"),)),))
    with pytest.raises(OSError, match="404"):
        fetching.fetch(missing, places / "cache")


def test_names_of_sets_are_checked_and_listed(places, capsys):
    with pytest.raises(ValueError, match="unknown data set 'mnst'. Did you mean 'mnist'"):
        inventory.names_of(["imdb", "mnst"])
    assert inventory.names_of(["fashion-mnist"]) == ["fashion_mnist"]
    assert inventory.names_of(["all"]) == list(sources.SOURCES)
    (places / "data" / "mnist").mkdir()
    assert cli.main(["data", "list"]) == 0
    told = capsys.readouterr().out
    assert "mnist            incomplete, lacks 4 of 4" in told
    assert "planetoid        bayesformer data get" in told
    assert "ambiguous_mnist  bayesformer data make" in told


CONLLU = """# a comment
1\tThat\tthat\tPRON\tWDT\t_\t_
2-3\tdon't\t_\t_\t_
2\tTHIS\tthis\tPRON\tDT\t_
3\t3rd\t3rd\tADJ\tJJ\t_

1\tthis\tthis\tPRON\tDT\t_

"""


def test_a_treebank_is_read_from_its_own_format():
    plain = converting.four_columns([CONLLU.encode()]).decode()
    assert plain == "That\tthat\tPRON\tWDT\nTHIS\tthis\tPRON\tDT\n3rd\t3rd\tADJ\tJJ\n\nthis\tthis\tPRON\tDT\n\n"
    undone = converting.version_1_2([CONLLU.encode()]).decode()
    assert undone == plain.replace("PRON\tWDT", "DET\tWDT").replace("THIS\tthis\tPRON", "THIS\tthis\tDET")


def test_reviews_come_from_the_archive_in_order():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in {
            "aclImdb/train/pos/10_9.txt": "fine",
            "aclImdb/train/neg/2_1.txt": "bad é",
            "aclImdb/train/neg/1_3.txt": "poor",
            "aclImdb/train/unsup/1_0.txt": "no label",
            "aclImdb/test/neg/0_2.txt": "dull",
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    rows = [json.loads(line) for line in converting.train_reviews([file.getvalue()]).decode().splitlines()]
    assert [(row["label"], row["id"], row["rating"], row["text"]) for row in rows] == [
        (0, 1, 3, "poor"),
        (0, 2, 1, "bad é"),
        (1, 10, 9, "fine"),
    ]
    assert len(converting.test_reviews([file.getvalue()]).splitlines()) == 1


def planetoid_files(hostile=False):
    """700 nodes: 2 for training, 503 more, then test nodes of which one, number 600, is not known."""
    known, nodes, width = 590, 700, 7
    source = np.random.default_rng(1)
    features = csr_matrix((source.random((nodes, width)) < 0.4).astype(np.float32))
    classes = np.eye(3)[source.integers(0, 3, nodes)]
    test = source.permutation([i for i in range(known, nodes) if i != 600])
    graph = defaultdict(list, {i: [(i + 1) % nodes, i, (i + 1) % nodes] for i in range(nodes)})
    parts = [features[:2], classes[:2], features[test], classes[test], features[:known], classes[:known], graph]
    if hostile:
        parts[0] = partial(print, "run")
    return features, classes, [pickle.dumps(part) for part in parts] + ["\n".join(map(str, test)).encode()]


def test_citation_graphs_are_put_in_the_order_of_all_papers(places):
    features, classes, files = planetoid_files()
    path = places / "data" / "planetoid" / "cora.npz"
    path.parent.mkdir()
    path.write_bytes(converting.citation_graph(files))
    graph = planetoid.load("cora", normalise=False)
    expected = features.toarray()
    expected[600] = 0
    assert np.array_equal(graph.x.numpy(), expected)
    assert graph.y[600] == -1
    assert graph.y[[0, 700 - 1]].tolist() == classes[[0, 700 - 1]].argmax(1).tolist()
    assert [int(mask.sum()) for mask in (graph.train, graph.validation, graph.test)] == [2, 500, 109]
    assert not graph.test[600]
    pairs = {tuple(pair) for pair in graph.edge_index.T.tolist()}
    assert len(pairs) == graph.edge_index.shape[1] == 2 * 700  # no loops, each pair in both directions
    assert graph.edge_index.T.tolist() == sorted(graph.edge_index.T.tolist())
    with pytest.raises(ValueError, match=r"must hold arrays only; it asks for functools.partial"):
        converting.citation_graph(planetoid_files(hostile=True)[2])


def treebank_files(folder, train, dev=(("of", "ADP"),), test=(("of", "ADP"),)):
    """Files of sentences, each a list of (lemma, tag); returns their source."""
    files = []
    for part, sentences in {"train": train, "dev": [dev], "test": [test]}.items():
        text = "".join("".join(f"w\t{lemma}\t{tag}\t-\n" for lemma, tag in s) + "\n" for s in sentences)
        path = f"ud_english/v1.2-{part}.tsv.xz"
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(lzma.compress(text.encode()))
        files.append(DataFile(path, sha(text.encode()), ()))
    return DataSource("ud_english", "", "", tuple(files))


def test_words_are_counted_split_and_padded(places):
    often, rare = [("dog", "NOUN")] * 5, [("cat", "NOUN")] * 4
    odd = [(",", "PUNCT"), ("2", "NUM"), ("3rd", "ADJ"), ("n't", "PART")]
    source = treebank_files(
        places / "data",
        [often, rare, odd, [(".", "PUNCT")]],
        dev=[("rd", "ADJ"), ("nt", "PART"), ("cat", "NOUN"), ("cow", "NOUN")],
        test=[("dog", "NOUN")] * 7,
    )
    data = treebank.load(source, length=3)
    assert data.vocabulary == ("<pad>", "<unk0>", "<unk1>", "<unk2>", "<unk3>", "<unk4>", "dog")
    # 5 words are 3 + 2, 4 are 3 + 1; of the odd sentence "rd" and "nt" are left, once each; the last one is empty
    assert data.train.inputs["input_ids"].tolist() == [[6, 6, 6], [6, 6, 0], [5, 5, 5], [5, 0, 0], [2, 2, 0]]
    assert data.validation.inputs["input_ids"].tolist() == [[2, 2, 5], [1, 0, 0]]
    assert torch.equal(data.train.mask, data.train.inputs["input_ids"] > 0)
    noun, other = treebank.TAGS.index("NOUN"), treebank.OTHER
    assert data.train.targets[1].tolist() == [noun, noun, other]
    assert len(data.test) == 3
    assert treebank.encode_words([["dog", "cat", "cow"]], data.numbers, 4).tolist() == [[6, 5, 1, 0]]


def test_a_treebank_of_other_columns_is_refused(places):
    source = treebank_files(places / "data", [[("dog", "NOUNS")]])
    with pytest.raises(DamagedFileError, match=r"v1.2-train.tsv.xz must be lines of form, lemma and two tags: got"):
        treebank.load(source)


def test_the_ambiguity_corpus_has_a_lemma_for_every_word():
    corpus = treebank.ambiguity_corpus()
    assert len(corpus.sentences) == 30
    assert int(corpus.ambiguous.sum()) == 19
    assert all(len(s.split()) == len(words) for s, words in zip(corpus.sentences, corpus.lemmas, strict=True))
    assert corpus.lemmas[4] == ("the", "robber", "do", "fire", "he", "gun", "and", "just", "leave")


def test_content_is_read_whatever_it_is_packed_in(tmp_path):
    for name, packed in {"a.gz": gzip.compress(b"text"), "a.xz": lzma.compress(b"text"), "a.txt": b"text"}.items():
        (tmp_path / name).write_bytes(packed)
        assert read_content(tmp_path / name, "file", sha(b"text")) == b"text"
    np.savez(tmp_path / "one.npz", a=np.arange(3), test_index=np.arange(2))
    np.savez_compressed(tmp_path / "two.npz", a=np.arange(3))
    one, two = (unpacked((tmp_path / f"{name}.npz").read_bytes(), "x.npz") for name in ("one", "two"))
    assert one == two
