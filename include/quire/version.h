// Quire's version, for the preprocessor. CMakeLists.txt refuses numbers other than its own.
#ifndef QUIRE_VERSION_H_
#define QUIRE_VERSION_H_

#define QUIRE_VERSION_MAJOR 0
#define QUIRE_VERSION_MINOR 1
#define QUIRE_VERSION_PATCH 0
// Ordered as versions are: 100 for 0.1.0, 10203 for 1.2.3.
#define QUIRE_VERSION_NUMBER \
  (QUIRE_VERSION_MAJOR * 10000 + QUIRE_VERSION_MINOR * 100 + QUIRE_VERSION_PATCH)

#endif  // QUIRE_VERSION_H_
