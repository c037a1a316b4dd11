"""The commands of `fedrec`: arguments, options, help and completion. Imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from fedrec import __version__
from fedrec.cli.families import FAMILIES
from fedrec.recipe.shipped import SCHEMA, shipped_folder, shipped_recipes

__all__ = ["Call", "Options", "command_line"]

#: What a command was given: its name in `command` (and `action`), options and arguments by name.
Options = SimpleNamespace
#: Runs a command and returns its exit code.
Call = Callable[[Options], int]

_BEGINNING = [
    ("fedrec run quickstart", "all of it, on bundled data"),
    ("fedrec ls", "what there is"),
    ("fedrec COMMAND --help", "the options of a command, with an example"),
]
_EXIT_CODES = [
    ("0", "done"),
    ("1", "a damaged history, or a method or a point of a sweep that failed"),
    ("2", "a mistake in what was asked for; the message says which"),
    ("130", "interrupted; the same command goes on"),
    ("143", "ended by SIGTERM, as of SLURM; the same command goes on"),
]


class _Command(click.Command):
    """A command that hands its options to a function; its help ends with examples."""

    def __init__(
        self, call: Call, path: str, about: str, params: Sequence[click.Parameter], *examples: str
    ) -> None:
        super().__init__(path.split()[-1], params=list(params), help=about)
        self.call = call
        self.path = path.split()
        self.examples = examples

    def invoke(self, ctx: click.Context) -> int:
        """Run the command and return its exit code."""
        named = dict(zip(("command", "action"), self.path, strict=False))
        return self.call(Options(**named, **ctx.params))

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the first sentence whole: lists wrap it, and nothing is cut."""
        return (self.help or "").partition(". ")[0].rstrip(".")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, which are commands and so are not wrapped."""
        with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
            for example in self.examples:
                for line in example.splitlines():
                    formatter.write(f"{' ' * formatter.current_indent}{line}\n")


class _Group(click.Group):
    """A command with commands below it, listed as they are used and not by letter."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which they were added."""
        return list(self.commands)


class _Fedrec(_Group):
    """The command with all the others; its help ends with how to begin, and the exit codes."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples and the exit codes."""
        with formatter.section("Begin with"):
            formatter.write_dl(_BEGINNING)
        with formatter.section("Exit codes"):
            formatter.write_dl(_EXIT_CODES)


def command_line(call: Call) -> click.Group:
    """Return the command `fedrec`.

    Args:
        call: Runs one of its commands and returns the exit code.

    Examples:
        >>> asked = []
        >>> group = command_line(lambda options: asked.append(options) or 0)
        >>> words = ["run", "quickstart", "--overwrite", "name=short"]
        >>> group.main(words, standalone_mode=False)
        0
        >>> asked[0].command, asked[0].target, asked[0].overrides, asked[0].overwrite
        ('run', 'quickstart', ('name=short',), True)
    """
    group = _Fedrec(
        "fedrec",
        help="Federated learning: record, attack, detect, recover, report.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    click.version_option(__version__, message="fedrec %(version)s")(group)
    for command in (*_of_recipes(call), *_of_runs(call), *_of_components(call), *_to_start(call)):
        group.add_command(command)
    # Lists show the short help whole, and would cut the other.
    about = "Look into a history; check, repair, encrypt or shrink it; forget a client"
    history = _Group("history", help=about, short_help=about)
    for command in _of_histories(call):
        history.add_command(command)
    group.add_command(history)
    group.add_command(_doctor(call))
    group.add_command(_completion(group))
    return group


def _of_recipes(call: Call) -> list[_Command]:
    run_options = [_output_dir("run folders lie"), _flag("--overwrite", _OVERWRITE)]
    recipe = [_recipe(), _overrides(), _allow()]
    return [
        _Command(
            call,
            "run",
            "Record, detect, recover and report. Goes on where an earlier run stopped.",
            [*recipe, *run_options, _no_progress(), *_common()],
            "fedrec run quickstart",
            "fedrec run mine.yaml name=short record.max_rounds=50",
        ),
        _Command(
            call,
            "record",
            "Train under attack and store the history.",
            [*recipe, *run_options, _no_progress(), *_common()],
            "fedrec record quickstart",
        ),
        _Command(
            call,
            "validate",
            "Check a recipe and list all of its mistakes. Runs nothing.",
            [*recipe, _output_dir("run folders lie"), *_common()],
            "fedrec validate mine.yaml aggregator=Median",
        ),
        _Command(
            call,
            "sweep",
            "Run a recipe at every point of a grid. Goes on where an earlier call stopped.",
            [
                _recipe(),
                _overrides(
                    "Values to sweep: a dotted key of the recipe and YAML values; commas in "
                    "brackets or quotes do not separate. A key with one value is set everywhere.",
                    metavar="key=value,value",
                ),
                _option("--repeats", "Seeds of each point.", metavar="K", type=int, default=1),
                _output_dir("the sweep's folder lies"),
                _option(
                    "--recordings",
                    "Where recordings lie, which several sweeps may share; by default in the "
                    "sweep's folder.",
                    metavar="DIR",
                    type=_FOLDER,
                ),
                _flag(
                    "--delete-histories",
                    "Remove the history of a recording once all of its points are done.",
                ),
                _flag("--dry-run", "List what there is to do and the disk it takes; do nothing."),
                _allow(),
                _no_progress(),
                *_common(),
            ],
            "fedrec sweep quickstart name=rules \\\n  aggregator=Median,TrimmedMean --repeats 3",
        ),
    ]


def _of_runs(call: Call) -> list[_Command]:
    return [
        _Command(
            call,
            "detect",
            "Find the malicious clients of a recording, or compare detectors on it.",
            [
                _run(),
                _overrides(),
                _option(
                    "--detector",
                    "Compare this detector (a class name, or {class_path: ..., init_args: "
                    "{...}}) on the recording, and change nothing. Repeatable.",
                    multiple=True,
                    shell_complete=_classes("detectors"),
                ),
                _allow(),
                _no_progress(),
                *_common(),
            ],
            "fedrec detect runs/quickstart",
            "fedrec detect runs/quickstart --detector NormOutlier",
        ),
        _Command(
            call,
            "recover",
            "Recover the model of a recording.",
            [_run(), _overrides(), _allow(), _no_progress(), *_common()],
            "fedrec recover runs/quickstart",
        ),
        _Command(
            call,
            "report",
            "Write results.json and report.html of a run again, or compare runs on one page.",
            [
                _run(nargs=-1, required=True),
                _option(
                    "--output",
                    "Page to write; by default report.html in the run folder, of several here.",
                    short="-o",
                    metavar="FILE",
                    type=_FILE,
                ),
                *_common(),
            ],
            "fedrec report runs/quickstart",
            "fedrec report runs/one runs/two -o both.html",
        ),
        _Command(
            call,
            "plot",
            "Draw the results of a sweep, or the costs of the clients of a run.",
            [
                _argument("target", "PATH", "Folder of a sweep, its results.csv, or a run.", _FILE),
                _option(
                    "--kind",
                    "values: figures against a swept key (default); cost: a figure against what "
                    "clients spend; cp: how CP is distributed over clients (default of a run).",
                    type=click.Choice(["values", "cost", "cp"]),
                ),
                _option("--x", "Swept key along the axis; by default the first.", metavar="KEY"),
                _option(
                    "--y",
                    "Columns, such as ter,asr,acp, which are the default; that of cost is ter.",
                    metavar="FIGURES",
                ),
                _option("--by", "What colours tell apart.", metavar="KEY", default="method"),
                _option(
                    "--where",
                    "Draw only rows with these values. Repeatable.",
                    metavar="key=value,value",
                    multiple=True,
                ),
                _option(
                    "--output",
                    "Picture to write: .png, .svg or .pdf.",
                    short="-o",
                    metavar="FILE",
                    type=_FILE,
                ),
                *_common(),
            ],
            "fedrec plot runs/rules --y ter,acp",
        ),
    ]


def _of_components(call: Call) -> list[_Command]:
    add = "Add the classes of this module or package of yours. Repeatable."
    return [
        _Command(
            call,
            "ls",
            "List what a recipe can name, or the recipes that come with fedrec.",
            [
                click.Argument(
                    ["target"],
                    required=False,
                    metavar="[FAMILY]",
                    help=f"{', '.join(FAMILIES)}; or recipes. By default all families.",
                    shell_complete=lambda ctx, param, begun: _begin([*FAMILIES, "recipes"], begun),
                ),
                _allow(add),
                *_common(),
            ],
            "fedrec ls recipes",
            "fedrec ls aggregators",
        ),
        _Command(
            call,
            "show",
            "Show a component's arguments, documentation and paper.",
            [
                click.Argument(
                    ["target"],
                    metavar="NAME",
                    help="Class name, such as TrimmedMean.",
                    shell_complete=_classes(),
                ),
                _allow(add),
                *_common(),
            ],
            "fedrec show TrimmedMean",
        ),
        _Command(
            call,
            "schema",
            "Write a JSON Schema of recipes, by which editors complete and check them.",
            [
                _option(
                    "--output",
                    "File to write; by default standard output.",
                    short="-o",
                    metavar="FILE",
                    type=_FILE,
                ),
                _allow(add),
                *_common(json_too=False),
            ],
            f"fedrec schema --allow my_rules -o {SCHEMA}",
        ),
    ]


def _to_start(call: Call) -> list[_Command]:
    return [
        _Command(
            call,
            "new",
            "Make a small project: a rule of your own, its data, a recipe and a test.",
            [
                _argument("target", "NAME", "Folder to make; its name is that of the module."),
                _flag("--flower", "One whose clients are driven by Flower."),
                *_common(),
            ],
            "fedrec new my_rules",
            "fedrec new my_app --flower",
        ),
        _Command(
            call,
            "cp",
            "Copy a recipe that comes with fedrec, with the recipes that it extends.",
            [
                click.Argument(
                    ["target"],
                    metavar="RECIPE",
                    help="Its name, such as quickstart.",
                    shell_complete=lambda ctx, param, begun: _begin(shipped_recipes(), begun),
                ),
                _argument("folder", "FOLDER", "Where to copy to; made if missing.", _FOLDER),
                *_common(),
            ],
            "fedrec cp mnist/coffee_break_trim .",
        ),
    ]


def _doctor(call: Call) -> _Command:
    about = "Tell what fedrec finds on this machine, and what keeps it from working here."
    return _Command(call, "doctor", about, _common(), "fedrec doctor")


def _of_histories(call: Call) -> list[_Command]:
    where = _argument("target", "PATH", "History, or the run folder it lies in.", _FOLDER)
    key = _key_file("Master key of an encrypted history; by default that in FEDREC_HISTORY_KEY.")
    allow = _allow("Import this module of yours, which registers the history's codec. Repeatable.")
    common = [allow, _no_progress(), *_common()]

    def command(name: str, about: str, params: Sequence[click.Parameter], example: str) -> _Command:
        return _Command(
            call, f"history {name}", about, [*params, *common], f"fedrec history {example}"
        )

    return [
        command(
            "info",
            "Tell what a history holds, without reading its updates.",
            [where, key],
            "info runs/quickstart",
        ),
        command(
            "browse",
            "Look into its rounds: who was asked, who sent what, how large updates were.",
            [
                where,
                _option(
                    "--rounds",
                    "Such as 7, or 0,10,20, or 100:200:10, or -1 for the last; by default all, or "
                    "some of many.",
                    metavar="ROUNDS",
                ),
                _option("--clients", "By default all, or some of many.", metavar="ID,ID"),
                _option(
                    "--output",
                    "Page (.html) to write instead.",
                    short="-o",
                    metavar="FILE",
                    type=_FILE,
                ),
                key,
            ],
            "browse runs/quickstart --rounds 0:100:10",
        ),
        command(
            "verify",
            "Read everything and name all that is damaged. The exit code is 1 if anything is.",
            [where, key],
            "verify runs/quickstart --json",
        ),
        command(
            "repair",
            "Drop what is damaged, and nothing else. The old file is kept as data.mdb.damaged.",
            [where, key],
            "repair runs/quickstart",
        ),
        command(
            "compact",
            "Give free space in the file back to the disk.",
            [where, key],
            "compact runs/quickstart",
        ),
        command(
            "forget",
            "Leave nothing of what a client sent, in the history and in the run it lies in.",
            [
                where,
                _option(
                    "--client",
                    "Client to forget. Repeatable.",
                    metavar="ID",
                    multiple=True,
                    required=True,
                ),
                key,
            ],
            "forget runs/quickstart --client client-3",
        ),
        command(
            "new-key",
            "Write a new master key for encrypted histories to a file.",
            [_argument("target", "PATH", "File to make.", _FILE)],
            "new-key master.key",
        ),
        command(
            "export",
            "Write every round to an .npz file, checked and without any code in it.",
            [where, _argument("folder", "FOLDER", "Folder to make.", _FOLDER), key],
            "export runs/quickstart rounds",
        ),
        command(
            "import",
            "Make a history of what `export` wrote, checking all of it.",
            [
                _argument("folder", "FOLDER", "What `export` wrote.", _FOLDER),
                _argument("target", "PATH", "History to make.", _FOLDER),
                _option("--codec", "How to store updates; by default as they were."),
                _key_file("Master key to encrypt it with."),
            ],
            "import rounds again/history",
        ),
        command(
            "shard",
            "Copy a history to shards, which several processes can recover from.",
            [
                where,
                _argument("folder", "NEW", "History to make.", _FOLDER),
                _option(
                    "--shards",
                    "How many, at least the processes and at most the clients.",
                    metavar="N",
                    type=int,
                    required=True,
                ),
                key,
            ],
            "shard runs/quickstart sharded --shards 8",
        ),
        command(
            "merge",
            "Copy the shards of a history to one file.",
            [where, _argument("folder", "NEW", "History to make.", _FOLDER), key],
            "merge runs/quickstart merged/history",
        ),
    ]


def _completion(group: click.Group) -> _Command:
    """Return the command that prints what makes a shell complete words with TAB."""

    def source(options: Options) -> int:
        cls = get_completion_class(options.shell)
        click.echo(cls(group, {}, "fedrec", "_FEDREC_COMPLETE").source() if cls else "")
        return 0

    shells = click.Argument(["shell"], type=click.Choice(["bash", "zsh", "fish"]))
    return _Command(
        source,
        "completion",
        "Print a script by which a shell completes commands, recipes and class names.",
        [shells],
        'eval "$(fedrec completion bash)"  # in ~/.bashrc',
        'eval "$(fedrec completion zsh)"   # in ~/.zshrc',
        "fedrec completion fish | source   # in config.fish",
    )


_FILE = click.Path()
_FOLDER = click.Path(file_okay=False, path_type=str)
_OVERWRITE = "Remove an existing run of this name first."


def _argument(
    name: str, metavar: str, about: str, kind: click.ParamType[Any] | None = None
) -> click.Argument:
    return click.Argument([name], metavar=metavar, help=about, type=kind)


def _option(name: str, about: str, *, short: str | None = None, **settings: Any) -> click.Option:
    names = [name] if short is None else [short, name]
    return click.Option(names, help=about, show_default="default" in settings, **settings)


def _flag(name: str, about: str, short: str | None = None) -> click.Option:
    return _option(name, about, short=short, is_flag=True)


def _recipe() -> click.Argument:
    about = "YAML file, or the name of a recipe that comes with fedrec (fedrec ls recipes)."
    return click.Argument(["target"], metavar="RECIPE", help=about, shell_complete=_recipes)


def _run(**settings: Any) -> click.Argument:
    many = " ..." if settings else ""
    about = "Run folder, such as runs/quickstart."
    return click.Argument(
        ["target"], metavar=f"RUN{many}", help=about, type=click.Path(), **settings
    )


def _overrides(
    about: str = "Overrides: a dotted key of the recipe (recoverers.0.label) and a YAML value.",
    metavar: str = "key=value",
) -> click.Argument:
    return click.Argument(["overrides"], nargs=-1, metavar=f"[{metavar} ...]", help=about)


def _allow(
    about: str = "Let the recipe use the classes of this module or package of yours. Repeatable.",
) -> click.Option:
    return _option("--allow", about, metavar="MODULE", multiple=True)


def _output_dir(what: str) -> click.Option:
    return _option("--output-dir", f"Where {what}.", metavar="DIR", default="runs", type=_FOLDER)


def _key_file(about: str) -> click.Option:
    return _option("--key-file", about, metavar="FILE", type=_FILE)


def _no_progress() -> click.Option:
    return _flag("--no-progress", "No progress bars.")


def _common(json_too: bool = True) -> list[click.Option]:
    """Return the options that every command has."""
    print_json = _flag("--json", "Print one JSON document, and nothing else, on standard output.")
    return [
        *([print_json] if json_too else []),
        _flag("--quiet", "Say less: results, warnings and errors; no progress bars.", "-q"),
        _flag("--verbose", "Say more: also what Lightning and torch remark.", "-v"),
        _flag("--debug", "Show where an error comes from."),
    ]


def _begin(words: Any, begun: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(begun)]


def _recipes(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete names of recipes and YAML files; other files if there are none of these."""
    files = [str(path) for path in sorted(Path().glob("*.y*ml"))]
    # The kind comes first: bash forgets what it was told before.
    return [CompletionItem(begun, type="file"), *_begin([*shipped_recipes(), *files], begun)]


def _classes(
    family: str | None = None,
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return what completes the class names of a family, or of all families."""

    def complete(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
        known = _known()
        names = (
            known.get(family, []) if family else sorted({n for ns in known.values() for n in ns})
        )
        return _begin(names, begun)

    return complete


def _known() -> dict[str, list[str]]:
    """Return class names by family, as the schema beside the recipes has them: without torch."""
    schema = json.loads((shipped_folder() / SCHEMA).read_text(encoding="utf-8"))
    known: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for key in schema["$defs"]:
        family, _, name = key.partition(".")
        if name and family in known:
            known[family].append(name)
    return known
