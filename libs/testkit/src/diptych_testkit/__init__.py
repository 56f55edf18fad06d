"""What tests share: builders with defaults, a virtual clock, toy engines, real servers."""
