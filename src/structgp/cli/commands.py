"""All commands: their options and help.

Nothing here imports torch, so that help, completion and errors in options appear at once. The module that
does the work is imported when its command runs."""

from __future__ import annotations

from typing import Any

import click

from structgp import __version__
from structgp.cli import early_checks as checks
from structgp.cli.flags import (
    DOCUMENTS,
    FORMATS,
    INFERENCE,
    KERNELS,
    STRATEGIES,
    choice,
    device_option,
    encoding_option,
    feature_options,
    field_option,
    model_option,
    place_of,
    place_options,
    reading_options,
    snap_option,
    vectors_option,
    verbose,
)
from structgp.cli.group import Group, importing
from structgp.errors import InputError


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="structgp")
def main() -> None:
    """Label sequences, trees, grids and other graphs, and know how sure the labels are.

    Files have one token per line, columns separated by spaces or tabs, a blank line between sequences,
    and the label in the last column. Templates are CRF++'s or Wapiti's. CRFsuite's files, with a label
    and attributes on each line, need no template. JSON lines, one example per line, hold any structure.
    Documents of annotation tools (Prodigy, doccano, Label Studio, brat), CoNLL-U and plain text need none
    either. Where MODEL is an argument, -m MODEL is the same."""


@main.command()
@click.argument("paths", metavar="[TEMPLATE] TRAIN", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="Model file to write.")
@click.option("--dev", "dev_path", type=click.Path(), help="Labelled file to score after the fit.")
@click.option("--early-stopping", is_flag=True, help="Stop when the likelihood of --dev is highest.")
@feature_options
@click.option(
    "--constraints",
    "--scheme",
    metavar="NAME",
    help="Tagging scheme that every labelling obeys: BIO, IOBES, BILOU, IO or none; auto adopts the one "
    "that all of TRAIN obeys; or a file NAME.json with rules on any template, such as "
    """{"forbidden": {"parent": [["A", "B"]]}}.  [default: auto]""",
)
@click.option(
    "--forbid",
    nargs=2,
    multiple=True,
    metavar="LABEL NEXT",
    help="NEXT never follows LABEL; ^ is the start of a sequence, $ its end. May be repeated.",
)
@click.option("--missing", metavar="TEXT", help="Text in the label column of a token without a label.")
@click.option(
    "--annotators",
    metavar="NAME,...",
    help="The last columns of TRAIN are the labels of these annotators, with the text of --missing where "
    'they gave none; in JSON lines they are under "annotations", and "all" takes every annotator. Their '
    "reliability is learned, and the model predicts the true labels.",
)
@click.option(
    "--from",
    "from_path",
    type=click.Path(),
    metavar="MODEL",
    help="Start from a model that was trained on a part of TRAIN with the same template. This is much "
    "faster: the model's --data-weight stays, so there is no cross-validation.",
)
@click.option(
    "--class-weight",
    multiple=True,
    metavar="LABEL=FACTOR",
    help="Predict as if LABEL were FACTOR times as frequent; or 'balanced'. May be repeated.",
)
@click.option(
    "--inducing",
    type=int,
    help="Use at most this many inducing inputs instead of one weight per feature.  [default: weights; if "
    "the kernel or the optimiser does not support them, 1000 or the preset's number]",
)
@choice(
    "--kernel",
    ["auto", *KERNELS],
    "relevance learns how much each feature says; template, how much each template says, added up; "
    "template-product, the same, multiplied.",
)
@click.option(
    "--word-parts",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Feature whose values are taken apart into beginnings, ends and shapes: the number or name of a "
    "line of TEMPLATE, or a key; none leaves words whole, auto finds the token's word.",
)
@click.option(
    "--data-weight",
    default="auto",
    show_default=True,
    metavar="NUMBER",
    help="How many times each sequence counts: a larger number makes the model surer. auto chooses it by "
    "cross-validation in TRAIN.",
)
@choice("--inference", INFERENCE, "Optimiser of the evidence bound.")
@click.option(
    "--structure",
    default="chain",
    show_default=True,
    metavar="NAME",
    help="chain; piecewise, its pseudo-likelihood; or a file NAME.json that declares a structure in words, "
    'such as {"chain": {"order": 2}, "same": {"key": "word"}}, {"grid": {"neighbours": 8, "features": '
    '"both ends"}}, {"tree": {}}, {"edges": [{"name": "cites", "symmetric": true}]}, {"layers": {"pos": '
    '{"chain": {}}, "chunk": {"chain": {}}}} or {"segments": {"max_length": 8}}; with "program" and '
    '"most_entries" for how labellings are summed over. Features of columns go by the number or name of '
    "a line of TEMPLATE.",
)
@device_option
@click.option("--seed", default=0, show_default=True, help="Equal seeds give equal models.")
@click.option(
    "--shards",
    "shards_folder",
    type=click.Path(),
    metavar="FOLDER",
    help="Encode TRAIN into files in FOLDER and fit from there, batch by batch: memory does not grow with "
    "TRAIN. Complete files in FOLDER are used again.",
)
@click.option("--restart", is_flag=True, help="Ignore the checkpoint of a killed run.")
@encoding_option
def train(**given: Any) -> None:
    """Fit a model to the labelled file TRAIN, with features from TEMPLATE.

    With --format jsonl, TRAIN has one example per line: {"tokens": [{"word": "two"}, ...], "labels":
    ["QTY", ...]}, with "parents" for a tree, "edges" and "features" for a graph, "pixels" in rows in the
    place of tokens for a grid, "labels" by layer for layers.

    Ctrl-C stops early and keeps the model so far. After a crash, the same command continues the fit:
    until it is finished, its state is in the file MODEL.checkpoint.

    Under torchrun, the processes share the sequences, and the first one writes."""
    checks.check_train(**given)
    with importing():
        from structgp.cli.fitting import train as run

    run(**given)


@main.command()
@model_option
@click.argument("files", nargs=-1, type=click.Path())
@click.option("-o", "--output", type=click.Path(), help="File to write instead of standard output.")
@click.option(
    "-n",
    "--n-best",
    "--nbest",
    "n_best",
    type=click.IntRange(min=1),
    help="Number of labellings per sequence, the most probable first.",
)
@verbose("1: probabilities of the labelling and of each token's label; 2: of every label too.")
@click.option(
    "--decode",
    type=click.Choice(["auto", "f1", "accuracy", "sequence"]),
    help="What labels are chosen for: span F1, the most tokens right, or the most probable labelling; auto "
    "is f1 where labels are spans, else accuracy.  [default: as the model was trained]",
)
@click.option(
    "--defer",
    type=click.FloatRange(0),
    metavar="COST",
    help="Leave a token unlabelled (write --missing) if the chance of an error is above this: the cost of "
    "asking a person, where an error costs 1.",
)
@click.option(
    "--coverage",
    type=float,
    metavar="SHARE",
    help="For each token, write the set of labels, joined by |, that contains the true one with this "
    "probability. The model has to be calibrated.",
)
@click.option("--force", is_flag=True, help="Keep the labels in the file, and label the rest.")
@click.option(
    "--missing",
    default="?",
    show_default=True,
    metavar="TEXT",
    help="With --force and --defer, the text in the label column of a token without a label.",
)
@click.option(
    "--to",
    type=click.Choice(DOCUMENTS),
    help="Format to write documents in.  [default: that of FILES; prodigy for text]",
)
@click.option(
    "--field",
    metavar="NAME",
    help="Where CoNLL-U gets the labels: upos, xpos, deprel, feats:NAME or misc:NAME.  [default: as in "
    "training, else upos; misc:NER for spans if neither FILES nor the training file are CoNLL-U]",
)
@reading_options
def tag(**given: Any) -> None:
    """Label FILES, or standard input. Output looks like that of crf_test: the columns, a tab, the
    label; with -v1 or -v2 its probability after a slash; with -n one block per labelling, after a line
    with its rank and probability. A model of CRFsuite's attributes answers like crfsuite tag: the label
    alone; with -v1 or -v2 its probability after a colon.

    A model of JSON lines writes JSON lines: the line with "labels"; with -v1 the "probability" of the
    labelling and "probabilities" of its labels, with -v2 of every label; with -n "labellings", with
    --coverage "sets". Missing labels are null.

    A model of documents writes documents in the format of FILES, with spans and their probabilities, or
    with labels and theirs.

    Under torchrun, the processes share the sequences, and the first one writes."""
    checks.check_tag(**given)
    with importing():
        from structgp.cli.tagging import tag as run

    run(**given)


@main.command("next")
@click.option("-m", "--model", "model_path", type=click.Path(), help="Model; none before the first labels.")
@click.argument("files", metavar="POOL", nargs=-1, required=True, type=click.Path())
@click.option("-n", "--number", default=10, show_default=True, help="Number of sequences.")
@click.option(
    "--strategy",
    type=click.Choice(["batch", *STRATEGIES, "diverse", "random"]),
    help="How to choose; 'batch' avoids near-duplicates, 'diverse' and 'random' need no model.  [default: "
    "batch; without a model diverse]",
)
@click.option(
    "--exclude",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="Leave out the sequences of FILE, whatever their labels: those that are labelled already. May be "
    "repeated.",
)
@verbose("1: with probabilities, as 'tag -v 1' writes them; 2: of every label too.")
@click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="Format of POOL: without a model columns, crfsuite or jsonl; with a model of documents, one of "
    "theirs.  [default: columns, or as the model was trained]",
)
@choice("--cost", ["sequence", "token"], "Cost of labelling: the same per sequence, or per token.")
@click.option("--seed", default=0, show_default=True, help="Seed of --strategy random.")
@click.option("-o", "--output", type=click.Path(), help="File to write instead of standard output.")
@vectors_option
@snap_option
@device_option
@encoding_option
def next_command(**given: Any) -> None:
    """Choose the sequences of POOL to label next, most useful first.

    They are written with the model's labels in the last column, to be corrected; the place of each in its
    file goes to standard error. Labels in POOL are ignored.

    Before there is a model, leave -m out: then POOL has no labels yet, and the sequences are written with a
    question mark in the place of each label."""
    checks.check_next(**given)
    with importing():
        from structgp.cli.choosing import choose

    choose(**given)


@main.command("evaluate")
@model_option
@click.argument("test_path", metavar="TEST", type=click.Path())
@click.option(
    "--against",
    type=click.Choice(["crf"]),
    help="Also train a linear CRF on the same data, its regulariser cross-validated.",
)
@click.option("--train", "train_path", type=click.Path(), help="Training file, for --against.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@reading_options
def evaluate_command(**given: Any) -> None:
    """Score a model on the labelled file TEST."""
    checks.check_evaluate(**given)
    with importing():
        from structgp.cli.scoring import evaluate_files

    evaluate_files(**given)


@main.command()
@click.argument("model_path", metavar="MODEL", type=click.Path())
@click.argument("files", metavar="FILE", nargs=-1, required=True, type=click.Path())
@click.option("--level", default=0.9, show_default=True, help="Probability of the intervals.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@reading_options
def expect(**given: Any) -> None:
    """Say how good MODEL's labels of FILE are, without true labels: error, F1, precision and recall, with
    intervals that hold the true figures with the probability --level, if FILE is text like the training
    data. Labels in FILE are ignored. Several files count as one text."""
    checks.check_model(given["model_path"])
    checks.check_there(*given["files"])
    with importing():
        from structgp.cli.deciding import expect as run

    run(**given)


@main.command()
@click.argument("model_path", metavar="MODEL", type=click.Path())
@click.argument("data_path", metavar="DATA", type=click.Path())
@click.option("-o", "--output", type=click.Path(), help="Model file to write.  [default: MODEL]")
@reading_options
def calibrate(**given: Any) -> None:
    """Calibrate MODEL on the labelled file DATA, so that its sets (tag --coverage, or predict_sets in
    Python) come with a guarantee. DATA has to be text like that to be tagged, and not part of the training
    data. The labels stay the same."""
    checks.check_not_input(given["output"], given["data_path"])
    checks.check_writable(given["output"] or given["model_path"])
    checks.check_model(given["model_path"])
    checks.check_there(given["data_path"])
    with importing():
        from structgp.cli.deciding import calibrate as run

    run(**given)


@main.command("describe")
@click.argument("model_path", metavar="MODEL", type=click.Path())
def describe_command(**given: Any) -> None:
    """Show how MODEL was fitted and what it has learned: every choice of the fit with its reason, the
    prior scales of its templates, and its transitions."""
    checks.check_model(given["model_path"])
    with importing():
        from structgp.cli.showing import show_model

    show_model(**given)


@main.command()
@click.argument("model_path", metavar="MODEL", type=click.Path())
@click.argument("data_path", metavar="DATA", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="HTML page to write.")
@reading_options
def report(**given: Any) -> None:
    """Show a model's answers for the file DATA on one HTML page.

    If all of DATA has labels, the page compares them with the answers."""
    checks.check_not_input(given["output"], given["model_path"], given["data_path"])
    checks.check_writable(given["output"])
    checks.check_model(given["model_path"])
    checks.check_there(given["data_path"])
    with importing():
        from structgp.cli.showing import write_report

    write_report(**given)


@main.command()
@click.argument("files", metavar="POOL", nargs=-1, required=True, type=click.Path())
@click.option("--db", type=click.Path(), help="SQLite file of the labels.  [default: POOL.labels.db]")
@click.option("--types", metavar="A,B,...", help="Types of spans to label.  [default: those in POOL]")
@click.option("--tags", metavar="A,B,...", help="Labels of single tokens, in the place of --types.")
@click.option(
    "--format",
    type=click.Choice(["columns", "jsonl", *DOCUMENTS]),
    help="Format of POOL.  [default: columns with --template, else by its name: .txt, .conllu, ...]",
)
@click.option("--template", type=click.Path(), help="CRF++ template of the features.")
@click.option("--labelled", is_flag=True, help="The last column of POOL is a label.")
@click.option("--missing", metavar="TEXT", help="Text in the place of a missing label.  [default: ?]")
@click.option(
    "--model", "model_path", type=click.Path(), help="Model file to write.  [default: beside --db]"
)
@click.option("--annotator", metavar="NAME", help="Name that the page proposes.  [default: the user's]")
@click.option(
    "--export",
    type=click.Path(),
    metavar="FILE",
    help="Write what is labelled and end; - for standard output.",
)
@click.option("--to", type=click.Choice(DOCUMENTS), help="Format of --export.  [default: that of POOL]")
@click.option("--seed", default=0, show_default=True, help="Seed of random choices.")
@click.option(
    "--no-browser", "browser", is_flag=True, default=True, flag_value=False, help="Open no browser."
)
@place_options
@encoding_option
def label(**given: Any) -> None:
    """Open a page in the browser to label the sequences of POOL, with a model that learns as you go.

    Every label is on disk when the page goes on. The address that is printed holds a random token; without
    it nothing is answered. Other annotators open the same address and give their own names.

    \b
    structgp label --types PERSON,PLACE letters.txt
    structgp label letters.txt --export letters.jsonl --to prodigy
    structgp label --template template --types QTY,UNIT,NAME recipes.conll"""
    if given["to"] is not None and given["export"] is None:
        raise InputError("--to", "is for --export", "leave it out, or name a file with --export")
    checks.check_there(*given["files"])
    for name in ("export", "model_path"):
        checks.check_not_input(given[name], *given["files"], given["db"], given["template"])
    given["place"] = place_of(given)
    with importing():
        from structgp.cli.labelling import label as run

    run(**given)


@main.command()
@click.argument("model_path", metavar="MODEL", type=click.Path())
@click.option(
    "--vectors",
    "vectors_path",
    type=click.Path(),
    help="File of the word vectors that MODEL was trained with.",
)
@place_options
@device_option
def serve(**given: Any) -> None:
    """Answer over HTTP with the labels of MODEL: POST /tag with {"sequences": [...]}; /openapi.json says
    more. Requests that come at the same time are answered together. SIGTERM or Ctrl-C ends it."""
    checks.check_model(given["model_path"])
    given["place"] = place_of(given)
    with importing():
        from structgp.cli.labelling import serve as run

    run(**given)


@main.command()
@click.argument("source", metavar="IN", type=click.Path(allow_dash=True))
@click.argument("target", metavar="OUT", type=click.Path(allow_dash=True))
@click.option(
    "--from", "from_format", type=click.Choice(DOCUMENTS), help="Format of IN.  [default: by its name]"
)
@click.option(
    "--to", "to_format", type=click.Choice(DOCUMENTS), help="Format of OUT.  [default: by its name]"
)
@choice("--scheme", ["BIO", "IOBES", "BILOU", "IO"], "Tagging scheme of labels that are made from spans.")
@snap_option
@field_option
@click.option(
    "--missing",
    metavar="TEXT",
    help="Text that stands in columns for a label that is not known.  [default: ?]",
)
@encoding_option
def convert(**given: Any) -> None:
    """Convert documents from one format to another: text, tokens, labels and spans with their offsets.

    The end of a file's name tells its format: .conll, .conllu, .jsonl (prodigy), .json (label-studio), .txt
    (text). OUT is a folder for brat; - is standard input or output."""
    checks.check_there(*[path for path in [given["source"]] if path != "-"])
    checks.check_not_input(given["target"], given["source"])
    from structgp.cli.converting import convert as run

    run(**given)


@main.command()
@click.argument("line", default="1 (400 g) tin plum tomatoes, roughly chopped")
@click.option(
    "-o",
    "--output",
    default="structgp-demo.html",
    show_default=True,
    type=click.Path(),
    help="Page to write.",
)
@click.option("--seed", default=0, show_default=True, help="Equal seeds give equal runs.")
def demo(**given: Any) -> None:
    """Show on one screen what the package is for: learn from the embedded corpus of recipe ingredients,
    label LINE with alternatives, score the model beside a linear CRF, say how good it expects to be without
    labels, and write a report page."""
    if not given["line"].strip():
        raise InputError("LINE", "no words", "give an ingredient, such as '3 ripe figs, halved'")
    checks.check_writable(given["output"])
    with importing():
        from structgp.cli.demonstrating import demo as run

    run(**given)
