# Sourced: hands pip's settings (indexes, constraints, local wheels) on to uv, which does not read them.
_hand_on() { # VARIABLE SETTING; what is set already stays
  eval "[ -z \"\${$1:-}\" ]" || return 0
  # `pip config list` prints KEY='VALUE'; the environment's keys come first and win.
  _value=$(python3 -m pip config list 2>/dev/null | sed -n "s/^\(:env:\|global\|install\)\.$2='\(.*\)'$/\2/p" | head -n 1)
  if [ "$1" = UV_FIND_LINKS ]; then _value=$(printf '%s' "$_value" | tr ' ' ','); fi
  if [ -n "$_value" ]; then export "$1=$_value"; fi
}

_hand_on UV_CONSTRAINT constraint
_hand_on UV_DEFAULT_INDEX index-url
_hand_on UV_INDEX extra-index-url
_hand_on UV_FIND_LINKS find-links
# pip looks for the best version in all indexes, uv in the first that has the package.
export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
