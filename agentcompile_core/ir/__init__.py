"""Values: the graph, regions and matches, plans, candidates, verdicts, records, advice, selections, bundles. No torch, no effects."""
