{models}() (
  shopt -s nocasematch
  for name in {model_names}; do
    [[ $name == "$1"* ]] && printf '%s\n' "$name"
  done
  compgen -d -- "$1"
)
{gpus}() (
  shopt -s nocasematch
  [[ $1 =~ ^([0-9]+x)* ]]
  count=${{BASH_REMATCH[0]}}
  for kind in {gpu_kinds}; do
    [[ $kind == "${{1#"$count"}}"* ]] && printf '%s\n' "$count$kind"
  done
)
