#include "model/foreign_file.h"

#include <algorithm>

namespace opst::model {

namespace {

bool begins_with(std::string_view text, std::string_view beginning) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return text.size() >= beginning.size() &&
         std::equal(beginning.begin(), beginning.end(), text.begin(), [&](char a, char b) { return a == lower(b); });
}

}  // namespace

std::string what_it_is(std::string_view head) {
  if (begins_with(head, "version https://git-lfs")) {
    return ": it is a pointer of git-lfs, which stands for the file (git lfs pull fetches the file)";
  }
  std::string_view text = head.substr(0, 1024);
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n\xEF\xBB\xBF"), text.size()));
  if (begins_with(text, "<!doctype html") || begins_with(text, "<html")) {
    return ": it is an HTML page, so what was downloaded is not the model";
  }
  if (begins_with(head, "pk\x03\x04")) return ": it is a zip archive (PyTorch's format, or a packed download)";
  if (begins_with(head, "\x1F\x8B")) return ": it is compressed by gzip";
  // A safetensors file: the length of its header in 8 bytes, then JSON.
  if (head.size() > 9 && head[8] == '{' && head[7] == '\0') return ": it looks like a safetensors file";
  for (const char* old : {"lmgg", "tjgg", "fmgg", "algg"}) {
    if (begins_with(head, old)) return ": it is in a format that GGUF replaced; convert the model anew";
  }
  return " (the magic is missing)";
}

}  // namespace opst::model
