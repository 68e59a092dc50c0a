// What the released wheel's libraries use of newer C and C++ libraries than those of manylinux_2_28. They are
// defined here and hidden, so that the wheel needs only the older libraries. Without them `auditwheel` names
// the symbol that is too new.

#include <new>
#include <sstream>

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

// glibc 2.32. False: the reference counts of std::shared_ptr are always atomic.
HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

// GLIBCXX_3.4.26: std::stringstream().
HIDDEN void make_stringstream(void* place) __asm__(
    "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_stringstream(void* place) { new (place) std::stringstream(std::ios_base::in | std::ios_base::out); }

// GLIBCXX_3.4.29: std::__throw_bad_array_new_length().
HIDDEN [[noreturn]] void throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() { throw std::bad_array_new_length(); }
