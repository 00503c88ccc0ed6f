// Light or dark, as chosen before: a classic script in the head, so that the page is never drawn in the other first.

{
  const chosen = localStorage.getItem("giornata-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
