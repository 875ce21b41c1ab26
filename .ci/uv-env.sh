# Sourced: hands pip's settings (indexes, constraints, local wheels) on to uv, which does not read them.
_pip_setting() { # `pip config list` prints KEY='VALUE'; the environment's keys come first and win
  python3 -m pip config list 2>/dev/null | sed -n "s/^\(:env:\|global\|install\)\.$1='\(.*\)'$/\2/p" | head -n 1
}

if [ -z "${UV_CONSTRAINT:-}" ]; then
  _value=$(_pip_setting constraint)
  if [ -n "$_value" ]; then export UV_CONSTRAINT="$_value"; fi
fi
if [ -z "${UV_DEFAULT_INDEX:-}" ]; then
  _value=$(_pip_setting index-url)
  if [ -n "$_value" ]; then export UV_DEFAULT_INDEX="$_value"; fi
fi
if [ -z "${UV_INDEX:-}" ]; then
  _value=$(_pip_setting extra-index-url)
  if [ -n "$_value" ]; then export UV_INDEX="$_value"; fi
fi
if [ -z "${UV_FIND_LINKS:-}" ]; then
  _value=$(_pip_setting find-links)
  if [ -n "$_value" ]; then export UV_FIND_LINKS="$(printf '%s' "$_value" | tr ' ' ',')"; fi
fi
# pip looks for the best version in all indexes, uv in the first that has the package.
export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
