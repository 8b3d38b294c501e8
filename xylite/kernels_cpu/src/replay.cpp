// A run of calls, kept and made again: a forward pass without the interpreter in between.
#include "api.h"

namespace xl {

using Entry = int (*)(Pool*, const void*);

struct Call {
  int64_t entry, arguments;  // addresses: an entry point that takes a struct, and the struct
};

}  // namespace xl

using namespace xl;

// Every call in order; the code of the first that fails.
XL_API int xl_replay(Pool* pool, int64_t count, const Call* calls) {
  for (int64_t i = 0; i < count; i++) {
    const auto entry = reinterpret_cast<Entry>(calls[i].entry);
    if (const int code = entry(pool, reinterpret_cast<const void*>(calls[i].arguments))) return code;
  }
  return 0;
}
