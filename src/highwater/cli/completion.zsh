{models}() {{
  compadd -M 'm:{{a-zA-Z}}={{A-Za-z}}' -- {model_names}
  _files -/
}}
{gpus}() {{
  compset -P '[0-9]##x'
  compset -P '[0-9]##x'
  compadd -M 'm:{{a-zA-Z}}={{A-Za-z}}' -- {gpu_kinds}
}}
