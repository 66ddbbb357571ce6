function {models}
  printf '%s\n' {model_names}
  __fish_complete_directories
end
function {gpus}
  set -l count (string match -r '^(?:[0-9]+x)*' -- (commandline -ct))
  for kind in {gpu_kinds}
    printf '%s\n' "$count$kind"
  end
end
