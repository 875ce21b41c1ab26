"""An ensemble of models distilled into one."""
