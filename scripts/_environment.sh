# Sourced by the other scripts: makes .venv once and installs the project with the given extras.
# LIT_GRPO_VENV names another place for the environment; PYTHON another interpreter.

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
    if [ -n "$candidate" ] && command -v "$candidate" > /dev/null 2>&1 &&
      "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Python 3.11 or later is needed and was not found. Set PYTHON to its path." >&2
  return 1
}

# Installs only when the requirements have changed since the last time.
prepare_environment() {
  local extras="$1" python stamp wanted
  VENV="${LIT_GRPO_VENV:-$PWD/.venv}"
  stamp="$VENV/.lit-grpo$extras"
  wanted="$(cksum < pyproject.toml) $PWD"
  if [ "$(cat "$stamp" 2> /dev/null)" != "$wanted" ]; then
    python="$(find_python)"
    [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
    if [ -x "$VENV/bin/lit-grpo" ]; then
      echo "Checking the installation of lit-grpo in $VENV ..."
    else
      echo "Installing lit-grpo into $VENV (some minutes) ..."
    fi
    rm -rf lit_grpo.egg-info  # a stale one would shadow the entry points of the installed package
    # An environment that uv has made has no pip.
    "$VENV/bin/python" -m pip --version > /dev/null 2>&1 || "$VENV/bin/python" -m ensurepip > /dev/null
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".$extras"
    echo "$wanted" > "$stamp"
  fi
}
