"""docs/generate.md says of every argument of transformers' ``generate`` who runs the request, as it is."""

from test_docs_reference import ROOT, script


def test_every_argument_of_transformers_is_tried_and_the_table_says_who_runs_it() -> None:
    text = (ROOT / "docs" / "generate.md").read_text()
    writer = script("write_generate_page")
    assert writer.page(writer.compiled(), text) == text, "run `make reference`"
