# Sourced from the root of a checkout: builds ours and puts it on the module path where Python does not find it, without a network. Wheels of
# what else is missing may lie in .whl.
if ! python3 -c "import agentcompile_core, agentcompile_templates_cuda_gemv" 2>/dev/null; then
  site=$(mktemp -d)
  python3 scripts/build_wheels.py --out "$site/dist" >"$site/log" 2>&1 || { tail -5 "$site/log"; exit 1; }
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$site/packages" "$site"/dist/*.whl $(ls .whl/*.whl 2>/dev/null) || exit 1
  export PYTHONPATH=$site/packages${PYTHONPATH:+:$PYTHONPATH}
fi
